# An installation without a single point of failure: three zones, no public address and no route to the internet, Kafka
# with IAM over TLS, Redis with a replica, gateways behind a balancer, and GPUs bought on demand and as spot.

data "aws_caller_identity" "current" {}

locals {
  tags = { Project = "tokenmill", Installation = var.name }

  environment = merge(module.storage.environment, module.events.environment, var.environment)

  # The services that containers and instances call. S3 has its gateway endpoint; Redis and Kafka are in the VPC.
  endpoints = ["ecr.api", "ecr.dkr", "ecs", "ecs-agent", "ecs-telemetry", "logs", "monitoring", "secretsmanager", "sqs"]
}

module "network" {
  source = "../../modules/network"

  name                = var.name
  availability_zones  = var.availability_zones
  nat                 = "none"
  interface_endpoints = local.endpoints
  reachable_buckets   = ["arn:aws:s3:::${var.bucket_name}", "arn:aws:s3:::${var.weights_bucket}"]
  kv_transfer_port    = anytrue([for fleet in values(var.fleets) : fleet.role != "both"]) ? var.kv_transfer_port : null
  flow_logs           = true
  kms_key_arn         = aws_kms_key.this.arn
  tags                = local.tags
}

module "storage" {
  source = "../../modules/storage"

  bucket_name   = var.bucket_name
  force_destroy = var.force_destroy
  kms_key_arn   = aws_kms_key.this.arn
  tags          = local.tags
}

module "events" {
  source = "../../modules/events"

  name        = var.name
  bucket      = module.storage.bucket
  bucket_arn  = module.storage.bucket_arn
  prefixes    = var.prefixes
  kms_key_arn = aws_kms_key.this.arn
  tags        = local.tags

  kafka = var.kafka == null ? null : merge(var.kafka, {
    vpc_id       = module.network.vpc_id
    subnet_ids   = slice(module.network.private_subnet_ids, 0, min(3, length(var.availability_zones)))
    client_cidrs = [module.network.cidr]
    uri_prefixes = { default = ["s3://${var.bucket_name}/incoming/"] }
  })
}

module "queue" {
  source = "../../modules/queue"

  name         = var.name
  vpc_id       = module.network.vpc_id
  subnet_ids   = module.network.private_subnet_ids
  client_cidrs = [module.network.cidr]
  node_type    = var.redis.node_type
  replicas     = var.redis.replicas
  kms_key_arn  = aws_kms_key.this.arn
  tags         = local.tags
}

module "control" {
  source = "../../modules/control"

  name               = var.name
  vpc_id             = module.network.vpc_id
  vpc_cidr           = module.network.cidr
  subnet_ids         = module.network.private_subnet_ids
  image              = var.control_image
  bucket_arn         = module.storage.bucket_arn
  kms_key_arns       = [aws_kms_key.this.arn]
  intake_policy      = module.events.intake_policy
  prefixes           = keys(var.prefixes)
  environment        = local.environment
  secrets            = module.queue.secrets
  container_insights = true
  tags               = local.tags

  intake     = { count = 2 }
  dispatcher = { count = 2, cpu = 2048, memory = 4096 }
  fleets     = { for name, fleet in var.fleets : name => { models = fleet.models, role = fleet.role, scaling = fleet.scaling } }

  gateway = one([for chosen in var.gateway[*] : merge(chosen, { balancer_subnets = module.network.private_subnet_ids })])
}

module "workers" {
  source   = "../../modules/workers"
  for_each = var.fleets

  name            = var.name
  fleet           = each.key
  vpc_id          = module.network.vpc_id
  vpc_cidr        = module.network.cidr
  subnet_ids      = module.network.private_subnet_ids
  image           = var.worker_image
  vllm_image      = var.vllm_image
  engine          = each.value.engine
  engine_options  = each.value.engine_options
  models          = each.value.models
  role            = each.value.role
  kv_transfer     = module.network.kv_transfer
  model_arns      = ["arn:aws:s3:::${var.weights_bucket}/*"]
  options         = each.value.options
  gpus_per_worker = each.value.gpus_per_worker
  memory_mib      = each.value.memory_mib
  pools           = each.value.pools
  scaling         = each.value.scaling
  ami_id          = var.ami_id
  bucket_arn      = module.storage.bucket_arn
  kms_key_arns    = [aws_kms_key.this.arn]
  environment     = local.environment
  secrets         = module.queue.secrets

  metric_namespace   = module.control.metric_namespace
  container_insights = true
  tags               = local.tags
}

module "observability" {
  source = "../../modules/observability"

  name                   = var.name
  emails                 = var.emails
  kms_key_arn            = aws_kms_key.this.arn
  queue_name             = module.events.queue_name
  dead_letter_queue_name = module.events.dead_letter_queue_name
  redis_node_ids         = module.queue.node_ids
  metric_namespace       = module.control.metric_namespace
  balancer               = module.control.balancer
  kafka                  = module.events.kafka
  monthly_budget         = var.monthly_budget
  budget_tag             = "Installation=${var.name}"
  control                = { cluster_name = module.control.cluster_name, service_names = module.control.service_names }
  tags                   = local.tags

  fleets = { for name, fleet in module.workers : name => {
    model_names     = fleet.model_names
    backlog_seconds = var.fleets[name].backlog_seconds
  } }
}
