# The control side: intake, dispatcher and gateway on Fargate. They keep all durable state in the bucket, so a task may
# be stopped, moved or doubled at any time.

data "aws_region" "current" {}

locals {
  region = data.aws_region.current.name

  # The same stop time for all: S3 requests are retried for minutes, and Fargate kills a task after two.
  stop_seconds  = 120
  drain_seconds = try(var.gateway.drain_seconds, 25)
  request_limit = try(var.gateway.request_timeout_seconds, 600)
  port          = 8000
  metrics_port  = lookup(var.environment, "TOKENMILL_METRICS__PORT", "9100")

  # A pool of `tokenmill autoscale` is a fleet here.
  pools = { for name, fleet in var.fleets : name => {
    models = [for model in fleet.models : split("=", model)[0]]
    role   = fleet.role
    limits = {
      min_workers             = fleet.scaling.min
      max_workers             = fleet.scaling.max
      cold_start_seconds      = fleet.scaling.cold_start_seconds
      standard_target_seconds = fleet.scaling.target_seconds
    }
  } }

  common = merge({ AWS_DEFAULT_REGION = local.region }, var.environment)

  # A process serves its metrics once it has started, inside its container only. ECS replaces a process that doesn't
  # answer, and rolls back a new version whose processes don't start.
  alive = "http://127.0.0.1:${local.metrics_port}/metrics"

  services = merge(
    {
      intake = {
        size        = merge(var.intake, { disk_gib = 21 })
        command     = ["intake"]
        stop        = local.stop_seconds
        environment = { TOKENMILL_METRICS__PORT = local.metrics_port }
        health      = local.alive
      }
      dispatcher = {
        size    = var.dispatcher
        command = ["dispatcher"]
        stop    = local.stop_seconds
        health  = local.alive
        environment = {
          TOKENMILL_METRICS__PORT            = local.metrics_port
          TOKENMILL_CLOUDWATCH__NAMESPACE    = var.metric_namespace
          TOKENMILL_CLOUDWATCH__INSTALLATION = var.name
          TOKENMILL_AUTOSCALE__POOLS         = jsonencode(local.pools)
        }
      }
    },
    var.gateway == null ? {} : {
      gateway = {
        size    = var.gateway
        command = ["gateway", "--host", "0.0.0.0", "--port", tostring(local.port)]
        stop    = local.drain_seconds + 35
        health  = "http://127.0.0.1:${local.port}/healthz"
        environment = {
          TOKENMILL_GATEWAY__AUTH                    = "keys" # with "auto" it would not start before there is a key
          TOKENMILL_GATEWAY__DRAIN_SECONDS           = tostring(local.drain_seconds)
          TOKENMILL_GATEWAY__REQUEST_TIMEOUT_SECONDS = tostring(local.request_limit)
          TOKENMILL_GATEWAY__KEEP_ALIVE_SECONDS      = tostring(local.request_limit + 90)
        }
      }
    },
  )

  # Python, since the image has no other HTTP client.
  health = { for name, service in local.services : name =>
    ["CMD", "python", "-c", "import urllib.request; urllib.request.urlopen('${service.health}', timeout=4)"]
  }

  environments = { for name, service in local.services : name => merge(local.common, service.environment) }
}

resource "aws_ecs_cluster" "this" {
  # checkov:skip=CKV_AWS_65: a variable; the smallest installation does not pay for container insights

  name = "${var.name}-control"
  tags = var.tags

  setting {
    name  = "containerInsights"
    value = var.container_insights ? "enabled" : "disabled"
  }
}

resource "aws_ecs_cluster_capacity_providers" "this" {
  cluster_name       = aws_ecs_cluster.this.name
  capacity_providers = ["FARGATE", "FARGATE_SPOT"]
}

resource "aws_cloudwatch_log_group" "this" {
  # checkov:skip=CKV_AWS_338: log_retention_days sets the retention; the bucket, not the log, holds the history of jobs

  for_each = local.services

  name              = "/tokenmill/${var.name}/${each.key}"
  retention_in_days = var.log_retention_days
  kms_key_id        = one(slice(var.kms_key_arns, 0, min(1, length(var.kms_key_arns))))
  tags              = var.tags
}

resource "aws_security_group" "this" {
  for_each = local.services

  name_prefix = "${var.name}-${each.key}-"
  description = "${each.key} of ${var.name}"
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = "${var.name}-${each.key}" })

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_egress_rule" "https" {
  for_each = local.services

  security_group_id = aws_security_group.this[each.key].id
  description       = "AWS's services, and webhooks; without NAT no route leads further than the endpoints"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = "0.0.0.0/0"
}

resource "aws_vpc_security_group_egress_rule" "redis" {
  for_each = local.services

  security_group_id = aws_security_group.this[each.key].id
  description       = "Redis"
  ip_protocol       = "tcp"
  from_port         = 6379
  to_port           = 6379
  cidr_ipv4         = var.vpc_cidr
}

resource "aws_vpc_security_group_egress_rule" "kafka" {
  security_group_id = aws_security_group.this["intake"].id
  description       = "Kafka"
  ip_protocol       = "tcp"
  from_port         = 9098
  to_port           = 9098
  cidr_ipv4         = var.vpc_cidr
}

resource "aws_ecs_task_definition" "this" {
  for_each = local.services

  family                   = "${var.name}-${each.key}"
  requires_compatibilities = ["FARGATE"]
  network_mode             = "awsvpc"
  cpu                      = each.value.size.cpu
  memory                   = each.value.size.memory
  execution_role_arn       = module.execution.role_arn
  task_role_arn            = aws_iam_role.task[each.key].arn
  tags                     = var.tags

  runtime_platform {
    operating_system_family = "LINUX"
    cpu_architecture        = var.architecture
  }

  ephemeral_storage {
    size_in_gib = max(21, each.value.size.disk_gib)
  }

  volume {
    name = "scratch"
  }

  container_definitions = jsonencode([
    {
      name                   = each.key
      image                  = var.image
      command                = each.value.command
      essential              = true
      stopTimeout            = each.value.stop
      user                   = "10001:10001"
      readonlyRootFilesystem = true
      mountPoints            = [{ sourceVolume = "scratch", containerPath = "/tmp", readOnly = false }]
      portMappings           = each.key == "gateway" ? [{ containerPort = local.port, hostPort = local.port, protocol = "tcp" }] : []
      environment            = [for key in sort(keys(local.environments[each.key])) : { name = key, value = local.environments[each.key][key] }]
      secrets                = [for key in sort(keys(var.secrets)) : { name = key, valueFrom = var.secrets[key] }]
      linuxParameters        = { initProcessEnabled = true, capabilities = { drop = ["ALL"] } }
      logConfiguration = {
        logDriver = "awslogs"
        options = {
          awslogs-group         = aws_cloudwatch_log_group.this[each.key].name
          awslogs-region        = local.region
          awslogs-stream-prefix = each.key
          mode                  = "non-blocking" # a slow CloudWatch must not stop the work
          max-buffer-size       = "16m"
        }
      }
      healthCheck = {
        command     = local.health[each.key]
        interval    = 15
        timeout     = 5
        retries     = 4
        startPeriod = 120
      }
    },
  ])
}

resource "aws_ecs_service" "this" {
  for_each = local.services

  name                              = each.key
  cluster                           = aws_ecs_cluster.this.id
  task_definition                   = aws_ecs_task_definition.this[each.key].arn
  desired_count                     = each.value.size.count
  platform_version                  = "1.4.0"
  propagate_tags                    = "SERVICE"
  enable_ecs_managed_tags           = true
  health_check_grace_period_seconds = each.key == "gateway" ? 60 : null
  tags                              = var.tags

  # New tasks start before old ones stop. Two tasks of one service can run at the same time.
  deployment_minimum_healthy_percent = 100
  deployment_maximum_percent         = 200

  deployment_circuit_breaker {
    enable   = true
    rollback = true
  }

  capacity_provider_strategy {
    capacity_provider = each.value.size.spot ? "FARGATE_SPOT" : "FARGATE"
    weight            = 1
  }

  network_configuration {
    subnets          = var.subnet_ids
    security_groups  = [aws_security_group.this[each.key].id]
    assign_public_ip = false
  }

  dynamic "load_balancer" {
    for_each = each.key == "gateway" ? [true] : []

    content {
      target_group_arn = aws_lb_target_group.gateway[0].arn
      container_name   = "gateway"
      container_port   = local.port
    }
  }

  depends_on = [
    aws_ecs_cluster_capacity_providers.this,
    aws_iam_role_policy.task,
    aws_lb_listener.https,
  ]
}
