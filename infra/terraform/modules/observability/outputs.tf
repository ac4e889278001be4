output "topic_arn" {
  description = "SNS topic of the alarms. Subscribe your paging service to it."
  value       = aws_sns_topic.alarms.arn
}

output "dashboard_name" {
  description = "Name of the CloudWatch dashboard."
  value       = aws_cloudwatch_dashboard.this.dashboard_name
}

output "gateway_alarm" {
  description = "Name of the alarm that fires when no gateway is ready, for the health check in the module dns. null: no balancer."
  value       = one(aws_cloudwatch_metric_alarm.no_gateway[*].alarm_name)
}
