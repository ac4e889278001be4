output "replication_group_id" {
  description = "Id of the replication group, for alarms."
  value       = aws_elasticache_replication_group.this.id
}

output "node_ids" {
  description = "Ids of the nodes, for alarms: CloudWatch has metrics of each node."
  value       = [for index in range(1 + var.replicas) : format("%s-%03d", aws_elasticache_replication_group.this.replication_group_id, index + 1)]
}

output "secrets" {
  description = "Environment variables with secret values: name -> ARN of the secret. ECS passes the values to containers; no task definition contains them."
  value       = { TOKENMILL_REDIS_URL = aws_secretsmanager_secret.url.arn }

  depends_on = [aws_secretsmanager_secret_version.url]
}
