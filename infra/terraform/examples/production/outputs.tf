output "root" {
  description = "The installation's root. Drop files below ROOT/incoming/; read results below ROOT/jobs/ID/results/."
  value       = local.environment.TOKENMILL_ROOT
}

output "queue_url" {
  description = "The queue that receives the bucket's notifications of dropped files."
  value       = module.events.queue_url
}

output "processes" {
  description = "Each process as its container runs it: command, variables, ARNs of secret variables, seconds to stop, IAM policy."
  value       = merge(module.control.processes, { for name, fleet in module.workers : "worker-${name}" => fleet.process })
}

output "gateway" {
  description = "The balancer's DNS name, and its zone for an alias record. null: no balancer."
  value       = module.control.balancer
}

output "gateway_alarm" {
  description = "Name of the alarm that fires when no gateway is ready, for the health check in the module dns. null: no balancer."
  value       = module.observability.gateway_alarm
}

output "kafka_cluster_arn" {
  description = "ARN of the Kafka cluster, for the policies of producers and consumers."
  value       = module.events.kafka_cluster_arn
}

output "dashboard" {
  description = "Name of the CloudWatch dashboard."
  value       = module.observability.dashboard_name
}
