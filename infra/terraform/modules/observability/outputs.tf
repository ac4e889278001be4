output "topic_arn" {
  description = "Where alarms are told. Subscribe whatever pages you."
  value       = aws_sns_topic.alarms.arn
}

output "dashboard_name" {
  description = "CloudWatch's dashboard."
  value       = aws_cloudwatch_dashboard.this.dashboard_name
}
