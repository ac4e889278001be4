output "cluster_name" {
  description = "ECS's cluster."
  value       = aws_ecs_cluster.this.name
}

output "service_names" {
  description = "Its services."
  value       = [for service in aws_ecs_service.this : service.name]
}

output "log_groups" {
  description = "Where each service's log is."
  value       = { for name, group in aws_cloudwatch_log_group.this : name => group.name }
}

output "processes" {
  description = "Each process as its container runs it: command, variables, the ARNs of variables that are secrets, and the command that says whether it is well."
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
  description = "The balancer before the gateways: its name in DNS, its zone for an alias record, and its suffix and its target group's for alarms. null: there is no gateway."
  value = var.gateway == null ? null : {
    dns_name            = aws_lb.gateway[0].dns_name
    zone_id             = aws_lb.gateway[0].zone_id
    arn_suffix          = aws_lb.gateway[0].arn_suffix
    target_group_suffix = aws_lb_target_group.gateway[0].arn_suffix
  }
}

output "metric_namespace" {
  description = "Where the dispatcher tells the backlog."
  value       = var.metric_namespace
}
