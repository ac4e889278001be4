# Valkey, which speaks Redis's protocol: shard queues, heartbeats, leases, the lane of interactive requests. All of its
# data may be lost at any time, so there are no snapshots.

resource "aws_security_group" "this" {
  name_prefix = "${var.name}-redis-"
  description = "Redis over TLS from inside the VPC"
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = "${var.name}-redis" })

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "clients" {
  for_each = toset(var.client_cidrs)

  security_group_id = aws_security_group.this.id
  description       = "Redis over TLS"
  ip_protocol       = "tcp"
  from_port         = 6379
  to_port           = 6379
  cidr_ipv4         = each.value
}

resource "aws_elasticache_subnet_group" "this" {
  name        = "${var.name}-redis"
  description = "Private subnets of ${var.name}"
  subnet_ids  = var.subnet_ids
  tags        = var.tags
}

# Writes fail when memory is full. Eviction could remove heartbeats, and live workers would seem dead.
resource "aws_elasticache_parameter_group" "this" {
  name        = "${var.name}-redis"
  description = "Of ${var.name}: nothing is evicted"
  family      = "valkey${split(".", var.engine_version)[0]}"
  tags        = var.tags

  parameter {
    name  = "maxmemory-policy"
    value = "noeviction"
  }
}

# The data source draws a new token at each plan; terraform_data keeps the first one.
data "aws_secretsmanager_random_password" "token" {
  password_length     = 64
  exclude_punctuation = true # the token is part of a URL
}

resource "terraform_data" "token" {
  input = sensitive(data.aws_secretsmanager_random_password.token.random_password)

  lifecycle {
    ignore_changes = [input]
  }
}

resource "aws_elasticache_replication_group" "this" {
  # checkov:skip=CKV2_AWS_50: failover is on with a replica; without one, the loss of the node loses no work

  replication_group_id = "${var.name}-redis"
  description          = "Coordination of ${var.name}"
  engine               = "valkey"
  engine_version       = var.engine_version
  node_type            = var.node_type
  num_cache_clusters   = 1 + var.replicas
  parameter_group_name = aws_elasticache_parameter_group.this.name
  subnet_group_name    = aws_elasticache_subnet_group.this.name
  security_group_ids   = [aws_security_group.this.id]

  automatic_failover_enabled = var.replicas > 0
  multi_az_enabled           = var.replicas > 0

  transit_encryption_enabled = true
  at_rest_encryption_enabled = true
  kms_key_id                 = var.kms_key_arn
  auth_token                 = terraform_data.token.output
  auth_token_update_strategy = "SET"

  snapshot_retention_limit   = 0
  auto_minor_version_upgrade = true
  apply_immediately          = true
  tags                       = var.tags
}

# The whole URL, because tokenmill reads it from one variable.
resource "aws_secretsmanager_secret" "url" {
  # checkov:skip=CKV2_AWS_57: terraform apply rotates the token, in the cache and in the processes at once

  name                    = "${var.name}/redis-url"
  description             = "Where Redis is, with its token: TOKENMILL_REDIS_URL"
  kms_key_id              = var.kms_key_arn
  recovery_window_in_days = var.secret_recovery_days
  tags                    = var.tags
}

resource "aws_secretsmanager_secret_version" "url" {
  secret_id     = aws_secretsmanager_secret.url.id
  secret_string = "rediss://:${terraform_data.token.output}@${aws_elasticache_replication_group.this.primary_endpoint_address}:6379/0"
}
