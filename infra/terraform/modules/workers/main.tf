# GPU workers: ECS on EC2, because Fargate has no GPUs. A pool is an Auto Scaling group behind a capacity provider; one
# service places its tasks on all pools of the fleet, one a GPU. Tasks use the host's network, so that they can read the
# spot interruption notice from the instance's metadata.

data "aws_region" "current" {}
data "aws_caller_identity" "current" {}

data "aws_ssm_parameter" "ami" {
  count = var.ami_id == null ? 1 : 0

  name = "/aws/service/ecs/optimized-ami/amazon-linux-2023/gpu/recommended/image_id"
}

locals {
  region = data.aws_region.current.name
  full   = "${var.name}-${var.fleet}"
  ami    = coalesce(var.ami_id, try(nonsensitive(data.aws_ssm_parameter.ami[0].value), null))
  names  = [for model in var.models : split("=", model)[0]]
  image  = var.engine == "vllm" ? var.vllm_image : var.image
  spot   = anytrue([for pool in values(var.pools) : pool.purchase == "spot"])

  # Less than the two minutes' notice of a spot instance; more than the lane's drain and a last checkpoint take.
  stop_seconds = 110

  # Prefill workers listen on all of the machine's addresses, and advertise the one towards Redis.
  has_role = var.role != "both"
  serving = var.role == "prefill" ? {
    TOKENMILL_KV_TRANSFER__HOST = "0.0.0.0"
    TOKENMILL_KV_TRANSFER__PORT = tostring(var.kv_transfer.port)
  } : {}

  # On the host's network a mapping opens nothing: ECS places no second task that needs the port on the machine.
  ports = var.role == "prefill" ? [{ containerPort = var.kv_transfer.port, hostPort = var.kv_transfer.port, protocol = "tcp" }] : []

  environment = merge(
    {
      AWS_DEFAULT_REGION            = local.region
      TOKENMILL_ENGINE              = var.engine
      TOKENMILL_CHECKPOINT_SECONDS  = tostring(var.checkpoint_seconds)
      TOKENMILL_LANE__DRAIN_SECONDS = tostring(var.lane_drain_seconds)
      TOKENMILL_SPOT_NOTICE         = tostring(local.spot)
      TOKENMILL_MODEL_CACHE         = "/cache/models"
      TOKENMILL_NATIVE_CACHE        = "/cache/native"
      TRITON_CACHE_DIR              = "/cache/triton"
      XDG_CACHE_HOME                = "/cache/xdg"
      NVIDIA_DRIVER_CAPABILITIES    = "compute,utility"
      AWS_EC2_METADATA_DISABLED     = "true" # the task uses its own credentials, never the instance's
    },
    local.serving,
    var.environment,
    { for name, value in var.engine_options : "TOKENMILL_VLLM__${upper(name)}" => value },
  )

  # Ranks of one model exchange data in shared memory; Docker's 64 MiB are too few for vLLM's.
  shared_memory = var.engine == "vllm" && var.gpus_per_worker > 1 ? { sharedMemorySize = 1024 * var.gpus_per_worker } : {}

  command = concat(["worker"], flatten([for model in var.models : ["--model", model]]), local.has_role ? ["--role", var.role] : [], var.options)
}

resource "aws_ecs_cluster" "this" {
  # checkov:skip=CKV_AWS_65: a variable; the smallest installation does not pay for container insights

  name = local.full
  tags = var.tags

  setting {
    name  = "containerInsights"
    value = var.container_insights ? "enabled" : "disabled"
  }
}

resource "aws_cloudwatch_log_group" "this" {
  # checkov:skip=CKV_AWS_338: log_retention_days sets the retention; the bucket, not the log, holds the history of jobs

  name              = "/tokenmill/${var.name}/worker-${var.fleet}"
  retention_in_days = var.log_retention_days
  kms_key_id        = one(slice(var.kms_key_arns, 0, min(1, length(var.kms_key_arns))))
  tags              = var.tags
}

resource "aws_security_group" "this" {
  name_prefix = "${local.full}-"
  description = "Workers of ${local.full}: nothing comes in"
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = local.full })

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_egress_rule" "https" {
  security_group_id = aws_security_group.this.id
  description       = "AWS's services; without NAT no route leads further than the endpoints"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = "0.0.0.0/0"
}

resource "aws_vpc_security_group_egress_rule" "redis" {
  security_group_id = aws_security_group.this.id
  description       = "Redis"
  ip_protocol       = "tcp"
  from_port         = 6379
  to_port           = 6379
  cidr_ipv4         = var.vpc_cidr
}

resource "aws_ecs_task_definition" "this" {
  family                   = local.full
  requires_compatibilities = ["EC2"]
  network_mode             = "host"
  execution_role_arn       = module.execution.role_arn
  task_role_arn            = aws_iam_role.task.arn
  tags                     = var.tags

  volume {
    name      = "cache"
    host_path = "/mnt/cache/tokenmill"
  }

  volume {
    name      = "scratch"
    host_path = "/mnt/cache/scratch"
  }

  container_definitions = jsonencode([{
    name                   = "worker"
    image                  = local.image
    command                = local.command
    essential              = true
    stopTimeout            = local.stop_seconds
    user                   = "10001:10001"
    readonlyRootFilesystem = true
    memoryReservation      = var.memory_mib
    resourceRequirements   = [{ type = "GPU", value = tostring(var.gpus_per_worker) }]
    portMappings           = local.ports
    mountPoints = [
      { sourceVolume = "cache", containerPath = "/cache", readOnly = false },
      { sourceVolume = "scratch", containerPath = "/tmp", readOnly = false },
    ]
    environment     = [for key in sort(keys(local.environment)) : { name = key, value = local.environment[key] }]
    secrets         = [for key in sort(keys(var.secrets)) : { name = key, valueFrom = var.secrets[key] }]
    linuxParameters = merge({ initProcessEnabled = true, capabilities = { drop = ["ALL"] } }, local.shared_memory)
    ulimits         = [{ name = "memlock", softLimit = -1, hardLimit = -1 }, { name = "nofile", softLimit = 65536, hardLimit = 65536 }]
    logConfiguration = {
      logDriver = "awslogs"
      options = {
        awslogs-group         = aws_cloudwatch_log_group.this.name
        awslogs-region        = local.region
        awslogs-stream-prefix = "worker"
        mode                  = "non-blocking" # a slow CloudWatch must not stop the engine
        max-buffer-size       = "16m"
      }
    }
  }])
}

resource "aws_ecs_service" "this" {
  name                    = "worker"
  cluster                 = aws_ecs_cluster.this.id
  task_definition         = aws_ecs_task_definition.this.arn
  desired_count           = max(1, var.scaling.min) # the first worker publishes its models; then the backlog sets the count
  propagate_tags          = "SERVICE"
  enable_ecs_managed_tags = true
  tags                    = var.tags

  deployment_minimum_healthy_percent = var.deployment.minimum_healthy
  deployment_maximum_percent         = var.deployment.maximum

  deployment_circuit_breaker {
    enable   = true
    rollback = true
  }

  dynamic "capacity_provider_strategy" {
    for_each = var.pools

    content {
      capacity_provider = aws_ecs_capacity_provider.this[capacity_provider_strategy.key].name
      weight            = capacity_provider_strategy.value.weight
      base              = capacity_provider_strategy.value.base
    }
  }

  # Fills instances, so that others become empty and can be terminated.
  ordered_placement_strategy {
    type  = "binpack"
    field = "memory"
  }

  lifecycle {
    ignore_changes = [desired_count]

    precondition {
      condition     = sum([for pool in values(var.pools) : pool.max_instances]) > 1 || var.deployment.minimum_healthy == 0
      error_message = "With one instance at most, a new version would wait for the old one for ever: set deployment.minimum_healthy to 0."
    }
  }

  depends_on = [aws_ecs_cluster_capacity_providers.this, aws_iam_role_policy.task]
}
