output "replication_group_id" {
  description = "The cache, for alarms."
  value       = aws_elasticache_replication_group.this.id
}

output "node_ids" {
  description = "Its nodes, for alarms: CloudWatch counts each by itself."
  value       = [for index in range(1 + var.replicas) : format("%s-%03d", aws_elasticache_replication_group.this.replication_group_id, index + 1)]
}

output "secrets" {
  description = "Variables whose values are secrets: name -> ARN of the secret. They are given to containers by ECS, and stand in no task definition."
  value       = { TOKENMILL_REDIS_URL = aws_secretsmanager_secret.url.arn }

  depends_on = [aws_secretsmanager_secret_version.url]
}
