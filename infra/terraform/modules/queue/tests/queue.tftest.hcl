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
    error_message = "anybody in the VPC may read along, or get in"
  }

  assert {
    condition     = one([for parameter in aws_elasticache_parameter_group.this.parameter : parameter.value if parameter.name == "maxmemory-policy"]) == "noeviction"
    error_message = "live workers' heartbeats could be dropped"
  }

  assert {
    condition     = startswith(nonsensitive(aws_secretsmanager_secret_version.url.secret_string), "rediss://:0123456789abcdef")
    error_message = "processes are told no token, or no TLS"
  }

  assert {
    condition     = keys(output.secrets) == ["TOKENMILL_REDIS_URL"] && length(output.node_ids) == 1
    error_message = "containers get another variable, or alarms watch other nodes"
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
