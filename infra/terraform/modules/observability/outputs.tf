output "topic_arn" {
  description = "SNS topic of the alarms. Subscribe your paging service to it."
  value       = aws_sns_topic.alarms.arn
}

output "dashboard_name" {
  description = "Name of the CloudWatch dashboard."
  value       = aws_cloudwatch_dashboard.this.dashboard_name
}
