output "cluster_name" {
  description = "Name of the ECS cluster."
  value       = aws_ecs_cluster.this.name
}

output "service_names" {
  description = "Names of its services."
  value       = [for service in aws_ecs_service.this : service.name]
}

output "log_groups" {
  description = "Log group of each service."
  value       = { for name, group in aws_cloudwatch_log_group.this : name => group.name }
}

output "processes" {
  description = "Each process as its container runs it: command, variables, ARNs of secret variables, and the command of its health check."
  value = {
    for name, service in local.services : name => {
      command     = service.command
      environment = local.environments[name]
      secrets     = var.secrets
      stop        = service.stop
      health      = local.health[name]
      policy      = data.aws_iam_policy_document.task[name].json
    }
  }
}

output "balancer" {
  description = "The gateways' balancer: its DNS name, its zone for an alias record, and the ARN suffixes of it and its target group for alarms. null: no gateway."
  value = var.gateway == null ? null : {
    dns_name            = aws_lb.gateway[0].dns_name
    zone_id             = aws_lb.gateway[0].zone_id
    arn_suffix          = aws_lb.gateway[0].arn_suffix
    target_group_suffix = aws_lb_target_group.gateway[0].arn_suffix
  }
}

output "metric_namespace" {
  description = "CloudWatch namespace to which the dispatcher reports the backlog."
  value       = var.metric_namespace
}
