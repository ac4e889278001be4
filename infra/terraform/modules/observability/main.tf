# Alarms. Each describes the fault and its effect on jobs. No alarm fires because of high load alone.

data "aws_region" "current" {}
data "aws_caller_identity" "current" {}

locals {
  topic  = [aws_sns_topic.alarms.arn]
  models = distinct(flatten([for fleet in values(var.fleets) : fleet.model_names])) # prefill and decode fleets share them
}

resource "aws_sns_topic" "alarms" {
  name              = "${var.name}-alarms"
  kms_master_key_id = var.kms_key_arn
  tags              = var.tags
}

data "aws_iam_policy_document" "alarms" {
  statement {
    sid       = "AlarmsAndTheBudgetTell"
    actions   = ["sns:Publish"]
    resources = [aws_sns_topic.alarms.arn]

    principals {
      type        = "Service"
      identifiers = ["cloudwatch.amazonaws.com", "budgets.amazonaws.com"]
    }

    condition {
      test     = "StringEquals"
      variable = "aws:SourceAccount"
      values   = [data.aws_caller_identity.current.account_id]
    }
  }
}

resource "aws_sns_topic_policy" "alarms" {
  arn    = aws_sns_topic.alarms.arn
  policy = data.aws_iam_policy_document.alarms.json
}

resource "aws_sns_topic_subscription" "email" {
  for_each = toset(var.emails)

  topic_arn = aws_sns_topic.alarms.arn
  protocol  = "email"
  endpoint  = each.value
}

resource "aws_cloudwatch_metric_alarm" "dead_letters" {
  alarm_name          = "${var.name}-dead-letters"
  alarm_description   = "Notifications of dropped files failed repeatedly. The intake finds the files by listing; inspect the messages for the cause."
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateNumberOfMessagesVisible"
  dimensions          = { QueueName = var.dead_letter_queue_name }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 1
  threshold           = 0
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = local.topic
  tags                = var.tags
}

resource "aws_cloudwatch_metric_alarm" "drops_wait" {
  alarm_name          = "${var.name}-drops-wait"
  alarm_description   = "A dropped file has waited for an hour: no intake runs, or its tenant has too much queued work."
  namespace           = "AWS/SQS"
  metric_name         = "ApproximateAgeOfOldestMessage"
  dimensions          = { QueueName = var.queue_name }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 2
  threshold           = 3600
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = local.topic
  tags                = var.tags
}

resource "aws_cloudwatch_metric_alarm" "backlog" {
  for_each = { for pair in flatten([
    for name, fleet in var.fleets : [for model in fleet.model_names : { fleet = name, model = model, seconds = fleet.backlog_seconds }]
  ]) : "${pair.fleet}-${pair.model}" => pair }

  alarm_name          = "${var.name}-backlog-${replace(each.key, "/", "-")}"
  alarm_description   = "More than ${each.value.seconds} s of work wait for ${each.value.model}, even with all running workers. Raise scaling.max or max_instances, or check why no machine starts."
  threshold           = each.value.seconds
  comparison_operator = "GreaterThanThreshold"
  evaluation_periods  = 3
  treat_missing_data  = "notBreaching"
  alarm_actions       = local.topic
  ok_actions          = local.topic
  tags                = var.tags

  dynamic "metric_query" {
    for_each = { work = "BacklogSeconds", workers = "Workers" }

    content {
      id = metric_query.key

      metric {
        namespace   = var.metric_namespace
        metric_name = metric_query.value
        dimensions  = { Installation = var.name, Model = each.value.model }
        period      = 300
        stat        = "Maximum"
      }
    }
  }

  metric_query {
    id          = "each"
    label       = "Seconds of work for each worker"
    expression  = "IF(workers > 1, work / workers, work)"
    return_data = true
  }
}

# OpenJobs covers the whole installation, so it is reported even before the first model.
resource "aws_cloudwatch_metric_alarm" "silence" {
  alarm_name          = "${var.name}-dispatcher-silent"
  alarm_description   = "No dispatcher has reported the backlog for ten minutes: jobs don't start, and workers are neither started nor stopped."
  namespace           = var.metric_namespace
  metric_name         = "OpenJobs"
  dimensions          = { Installation = var.name }
  statistic           = "SampleCount"
  period              = 300
  evaluation_periods  = 2
  threshold           = 1
  comparison_operator = "LessThanThreshold"
  treat_missing_data  = "breaching"
  alarm_actions       = local.topic
  ok_actions          = local.topic
  tags                = var.tags
}

# ECS reports CPU utilization for each running task, so a service without samples doesn't run.
resource "aws_cloudwatch_metric_alarm" "not_running" {
  for_each = toset(var.control.service_names)

  alarm_name          = "${var.name}-no-${each.value}"
  alarm_description   = "No ${each.value} runs. See its log and the service's events in ECS for the cause."
  namespace           = "AWS/ECS"
  metric_name         = "CPUUtilization"
  dimensions          = { ClusterName = var.control.cluster_name, ServiceName = each.value }
  statistic           = "SampleCount"
  period              = 300
  evaluation_periods  = 2
  threshold           = 1
  comparison_operator = "LessThanThreshold"
  treat_missing_data  = "breaching"
  alarm_actions       = local.topic
  ok_actions          = local.topic
  tags                = var.tags
}

resource "aws_cloudwatch_metric_alarm" "redis_memory" {
  for_each = toset(var.redis_node_ids)

  alarm_name          = "${var.name}-redis-memory-${each.value}"
  alarm_description   = "Redis is nearly full. When it is full, no shards are dispatched and streams end; no work is lost. Choose a larger node_type."
  namespace           = "AWS/ElastiCache"
  metric_name         = "DatabaseMemoryUsagePercentage"
  dimensions          = { CacheClusterId = each.value }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 2
  threshold           = 80
  comparison_operator = "GreaterThanThreshold"
  alarm_actions       = local.topic
  ok_actions          = local.topic
  tags                = var.tags
}

resource "aws_cloudwatch_metric_alarm" "no_gateway" {
  count = var.balancer == null ? 0 : 1

  alarm_name          = "${var.name}-no-gateway"
  alarm_description   = "No gateway is ready: HTTP requests get 503. Jobs continue."
  namespace           = "AWS/ApplicationELB"
  metric_name         = "HealthyHostCount"
  dimensions          = { LoadBalancer = var.balancer.arn_suffix, TargetGroup = var.balancer.target_group_suffix }
  statistic           = "Minimum"
  period              = 60
  evaluation_periods  = 3
  threshold           = 1
  comparison_operator = "LessThanThreshold"
  treat_missing_data  = "breaching"
  alarm_actions       = local.topic
  ok_actions          = local.topic
  tags                = var.tags
}

resource "aws_cloudwatch_metric_alarm" "gateway_errors" {
  count = var.balancer == null ? 0 : 1

  alarm_name          = "${var.name}-gateway-errors"
  alarm_description   = "More than 5 % of the HTTP responses are 5xx."
  threshold           = 5
  comparison_operator = "GreaterThanThreshold"
  evaluation_periods  = 3
  treat_missing_data  = "notBreaching"
  alarm_actions       = local.topic
  ok_actions          = local.topic
  tags                = var.tags

  dynamic "metric_query" {
    for_each = { failed = "HTTPCode_Target_5XX_Count", all = "RequestCount" }

    content {
      id = metric_query.key == "all" ? "requests" : metric_query.key

      metric {
        namespace   = "AWS/ApplicationELB"
        metric_name = metric_query.value
        dimensions  = { LoadBalancer = var.balancer.arn_suffix }
        period      = 300
        stat        = "Sum"
      }
    }
  }

  metric_query {
    id          = "share"
    label       = "5xx, %"
    expression  = "IF(requests > 20, 100 * FILL(failed, 0) / requests, 0)"
    return_data = true
  }
}

resource "aws_cloudwatch_metric_alarm" "kafka_disk" {
  for_each = var.kafka == null ? {} : { for broker in range(1, 1 + var.kafka.brokers) : "broker-${broker}" => tostring(broker) }

  alarm_name          = "${var.name}-kafka-disk-${each.key}"
  alarm_description   = "The disk of a Kafka broker is nearly full; a broker with a full disk stops. Raise volume_gib, or lower retention_hours."
  namespace           = "AWS/Kafka"
  metric_name         = "KafkaDataLogsDiskUsed"
  dimensions          = { "Cluster Name" = var.kafka.cluster_name, "Broker ID" = each.value }
  statistic           = "Maximum"
  period              = 300
  evaluation_periods  = 2
  threshold           = 80
  comparison_operator = "GreaterThanThreshold"
  alarm_actions       = local.topic
  ok_actions          = local.topic
  tags                = var.tags
}

resource "aws_budgets_budget" "month" {
  count = var.monthly_budget == null ? 0 : 1

  name         = "${var.name}-month"
  budget_type  = "COST"
  time_unit    = "MONTHLY"
  limit_amount = tostring(var.monthly_budget)
  limit_unit   = "USD"
  tags         = var.tags

  dynamic "cost_filter" {
    for_each = var.budget_tag == null ? [] : [split("=", var.budget_tag)]

    content {
      name   = "TagKeyValue"
      values = [format("user:%s$%s", cost_filter.value[0], cost_filter.value[1])]
    }
  }

  dynamic "notification" {
    for_each = { ACTUAL = 80, FORECASTED = 100 }

    content {
      notification_type          = notification.key
      threshold                  = notification.value
      threshold_type             = "PERCENTAGE"
      comparison_operator        = "GREATER_THAN"
      subscriber_sns_topic_arns  = local.topic
      subscriber_email_addresses = var.emails
    }
  }
}
