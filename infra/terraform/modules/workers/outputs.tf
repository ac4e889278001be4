output "cluster_name" {
  description = "ECS's cluster of this fleet."
  value       = aws_ecs_cluster.this.name
}

output "service_name" {
  description = "Its service."
  value       = aws_ecs_service.this.name
}

output "model_names" {
  description = "What requests call its models."
  value       = local.names
}

output "log_group" {
  description = "Where its log is."
  value       = aws_cloudwatch_log_group.this.name
}

output "autoscaling_group_names" {
  description = "The machines of each pool."
  value       = { for name, group in aws_autoscaling_group.this : name => group.name }
}

output "process" {
  description = "A worker as its container runs it: command, variables, and the ARNs of variables that are secrets."
  value = {
    command     = local.command
    environment = local.environment
    secrets     = var.secrets
    stop        = local.stop_seconds
    policy      = data.aws_iam_policy_document.task.json
  }
}
