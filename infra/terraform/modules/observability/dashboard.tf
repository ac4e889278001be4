# One dashboard: backlog, workers, errors.

locals {
  region = data.aws_region.current.name

  backlog = [for model in local.models : [var.metric_namespace, "BacklogSeconds", "Installation", var.name, "Model", model, { label = model }]]
  tokens  = [for model in local.models : [var.metric_namespace, "BacklogTokens", "Installation", var.name, "Model", model, { label = model }]]
  speed   = [for model in local.models : [var.metric_namespace, "TokensPerSecond", "Installation", var.name, "Model", model, { label = model }]]
  workers = [for model in local.models : [var.metric_namespace, "Workers", "Installation", var.name, "Model", model, { label = model }]]
  desired = [for fleet in keys(var.fleets) : [var.metric_namespace, "DesiredWorkers", "Installation", var.name, "Pool", fleet, { label = fleet }]]
  queues = [for name in [var.queue_name, var.dead_letter_queue_name] :
  ["AWS/SQS", "ApproximateNumberOfMessagesVisible", "QueueName", name, { label = name }]]
  redis = [for node in var.redis_node_ids : ["AWS/ElastiCache", "DatabaseMemoryUsagePercentage", "CacheClusterId", node, { label = node }]]

  graphs = concat(
    [
      { title = "Seconds of work for one worker", metrics = local.backlog, stat = "Maximum" },
      { title = "Tokens left", metrics = local.tokens, stat = "Maximum" },
      { title = "Desired workers", metrics = local.desired, stat = "Maximum" },
      { title = "Workers", metrics = local.workers, stat = "Maximum" },
      { title = "Tokens per second of one worker", metrics = local.speed, stat = "Maximum" },
      { title = "Open jobs", metrics = [[var.metric_namespace, "OpenJobs", "Installation", var.name, { label = "jobs" }]], stat = "Maximum" },
      { title = "Notifications of dropped files", metrics = local.queues, stat = "Maximum" },
      { title = "Redis memory, %", metrics = local.redis, stat = "Maximum" },
    ],
    var.balancer == null ? [] : [
      {
        title   = "HTTP responses"
        stat    = "Sum"
        metrics = [for kind in ["2XX", "4XX", "5XX"] : ["AWS/ApplicationELB", "HTTPCode_Target_${kind}_Count", "LoadBalancer", var.balancer.arn_suffix, { label = kind }]]
      },
    ],
  )
}

resource "aws_cloudwatch_dashboard" "this" {
  dashboard_name = var.name

  dashboard_body = jsonencode({
    widgets = [for index, graph in local.graphs : {
      type   = "metric"
      x      = 12 * (index % 2)
      y      = 6 * floor(index / 2)
      width  = 12
      height = 6
      properties = {
        title   = graph.title
        region  = local.region
        view    = "timeSeries"
        stat    = graph.stat
        period  = 60
        metrics = graph.metrics
        yAxis   = { left = { min = 0 } }
      }
    }]
  })
}
