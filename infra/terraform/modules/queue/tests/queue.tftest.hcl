mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name         = "tokenmill"
  vpc_id       = "vpc-1"
  subnet_ids   = ["subnet-a", "subnet-b"]
  client_cidrs = ["10.64.0.0/16"]
}

run "one_node" {
  assert {
    condition     = aws_elasticache_replication_group.this.transit_encryption_enabled && aws_elasticache_replication_group.this.auth_token != null
    error_message = "Redis accepts clients in the VPC without TLS or without a token"
  }

  assert {
    condition     = one([for parameter in aws_elasticache_parameter_group.this.parameter : parameter.value if parameter.name == "maxmemory-policy"]) == "noeviction"
    error_message = "heartbeats of live workers could be evicted"
  }

  assert {
    condition     = startswith(nonsensitive(aws_secretsmanager_secret_version.url.secret_string), "rediss://:0123456789abcdef")
    error_message = "the URL for processes lacks the token or TLS"
  }

  assert {
    condition     = keys(output.secrets) == ["TOKENMILL_REDIS_URL"] && length(output.node_ids) == 1
    error_message = "containers get another variable, or alarms cover other nodes"
  }
}

run "with_a_replica" {
  variables {
    replicas = 1
  }

  assert {
    condition     = aws_elasticache_replication_group.this.automatic_failover_enabled && aws_elasticache_replication_group.this.multi_az_enabled && length(output.node_ids) == 2
    error_message = "it doesn't fail over"
  }
}
