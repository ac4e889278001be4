# The smallest installation: it answers files dropped into a bucket with one GPU, which runs only while there is work.
# It has no Kafka, no HTTP and no redundancy. A process that dies is restarted and continues.

locals {
  tags = { Project = "tokenmill", Installation = var.name }

  scaling = { min = 0, max = 1 }

  environment = merge(module.storage.environment, module.events.environment, var.environment)
}

module "network" {
  source = "../../modules/network"

  name               = var.name
  availability_zones = var.availability_zones
  nat                = "single"
  tags               = local.tags
}

module "storage" {
  source = "../../modules/storage"

  bucket_name   = var.bucket_name
  force_destroy = var.force_destroy
  tags          = local.tags
}

module "events" {
  source = "../../modules/events"

  name       = var.name
  bucket     = module.storage.bucket
  bucket_arn = module.storage.bucket_arn
  tags       = local.tags
}

module "queue" {
  source = "../../modules/queue"

  name                 = var.name
  vpc_id               = module.network.vpc_id
  subnet_ids           = module.network.private_subnet_ids
  client_cidrs         = [module.network.cidr]
  secret_recovery_days = var.secret_recovery_days
  tags                 = local.tags
}

module "control" {
  source = "../../modules/control"

  name          = var.name
  vpc_id        = module.network.vpc_id
  vpc_cidr      = module.network.cidr
  subnet_ids    = module.network.private_subnet_ids
  image         = var.control_image
  bucket_arn    = module.storage.bucket_arn
  intake_policy = module.events.intake_policy
  environment   = local.environment
  secrets       = module.queue.secrets
  intake        = { spot = true }
  dispatcher    = { spot = true }
  fleets        = { gpu = { models = var.models, scaling = local.scaling } }
  tags          = local.tags
}

module "workers" {
  source = "../../modules/workers"

  name        = var.name
  fleet       = "gpu"
  vpc_id      = module.network.vpc_id
  vpc_cidr    = module.network.cidr
  subnet_ids  = module.network.private_subnet_ids
  image       = var.worker_image
  models      = var.models
  model_arns  = var.model_arns
  ami_id      = var.ami_id
  bucket_arn  = module.storage.bucket_arn
  environment = local.environment
  secrets     = module.queue.secrets

  pools      = { one = { purchase = "on_demand", instance_types = var.instance_types, max_instances = 1 } }
  scaling    = local.scaling
  deployment = { minimum_healthy = 0, maximum = 100 }

  metric_namespace = module.control.metric_namespace
  tags             = local.tags
}

module "observability" {
  source = "../../modules/observability"

  name                   = var.name
  emails                 = var.emails
  queue_name             = module.events.queue_name
  dead_letter_queue_name = module.events.dead_letter_queue_name
  redis_node_ids         = module.queue.node_ids
  metric_namespace       = module.control.metric_namespace
  monthly_budget         = var.monthly_budget
  budget_tag             = "Installation=${var.name}"
  control                = { cluster_name = module.control.cluster_name, service_names = module.control.service_names }
  tags                   = local.tags

  fleets = { gpu = {
    model_names = module.workers.model_names
  } }
}
