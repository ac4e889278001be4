output "root" {
  description = "The installation's root: drop files below ROOT/incoming/, read ROOT/jobs/ID/results/."
  value       = local.environment.TOKENMILL_ROOT
}

output "queue_url" {
  description = "The queue that the bucket tells of drops."
  value       = module.events.queue_url
}

output "processes" {
  description = "Each process as its container runs it: command, variables, ARNs of variables that are secrets, seconds to stop in, policy in the bucket."
  value       = merge(module.control.processes, { for name, fleet in module.workers : "worker-${name}" => fleet.process })
}

output "gateway" {
  description = "The balancer's name in DNS, and its zone for an alias record. null: there is none."
  value       = module.control.balancer
}

output "kafka_cluster_arn" {
  description = "For the policies of those who produce and consume."
  value       = module.events.kafka_cluster_arn
}

output "dashboard" {
  description = "CloudWatch's dashboard."
  value       = module.observability.dashboard_name
}
