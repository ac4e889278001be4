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
  value       = merge(module.control.processes, { worker = module.workers.process })
}

output "dashboard" {
  description = "Name of the CloudWatch dashboard."
  value       = module.observability.dashboard_name
}
