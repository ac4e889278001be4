output "cluster_name" {
  description = "Name of the fleet's ECS cluster."
  value       = aws_ecs_cluster.this.name
}

output "service_name" {
  description = "Name of its service."
  value       = aws_ecs_service.this.name
}

output "model_names" {
  description = "Names of its models in requests."
  value       = local.names
}

output "log_group" {
  description = "Its log group."
  value       = aws_cloudwatch_log_group.this.name
}

output "autoscaling_group_names" {
  description = "Auto Scaling group of each pool."
  value       = { for name, group in aws_autoscaling_group.this : name => group.name }
}

output "process" {
  description = "A worker as its container runs it: command, variables, ARNs of secret variables, seconds to stop, IAM policy."
  value = {
    command     = local.command
    environment = local.environment
    secrets     = var.secrets
    stop        = local.stop_seconds
    policy      = data.aws_iam_policy_document.task.json
  }
}
