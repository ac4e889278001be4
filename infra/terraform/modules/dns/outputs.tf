output "name" {
  description = "The name that callers use."
  value       = var.name
}

output "serving" {
  description = "Regions whose gateways get callers while they are healthy."
  value       = keys(local.serving)
}

output "health_check_ids" {
  description = "Id of each region's Route 53 health check, for alarms on HealthCheckStatus, which is in us-east-1."
  value       = { for region, check in aws_route53_health_check.this : region => check.id }
}
