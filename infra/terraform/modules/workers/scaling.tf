# Scales to the dispatcher's desired workers (DesiredWorkers of this fleet's pool). The dispatcher computes them from
# the backlog, the measured throughput and the deadlines, and applies its own cooldowns. GPU utilization does not count:
# it is as high for the last row of a job as for the first of a million.

locals {
  # A policy has 20 steps at most, so a large fleet has larger steps: up to max / 20 workers more than desired.
  steps  = min(20, var.scaling.max)
  counts = [for step in range(1, local.steps + 1) : ceil(var.scaling.max * step / local.steps)]
}

resource "aws_appautoscaling_target" "this" {
  service_namespace  = "ecs"
  resource_id        = "service/${aws_ecs_cluster.this.name}/${aws_ecs_service.this.name}"
  scalable_dimension = "ecs:service:DesiredCount"
  min_capacity       = var.scaling.min
  max_capacity       = var.scaling.max
  tags               = var.tags
}

# Sets the number of desired workers while there are any.
resource "aws_appautoscaling_policy" "work" {
  name               = "${local.full}-work"
  policy_type        = "StepScaling"
  service_namespace  = aws_appautoscaling_target.this.service_namespace
  resource_id        = aws_appautoscaling_target.this.resource_id
  scalable_dimension = aws_appautoscaling_target.this.scalable_dimension

  step_scaling_policy_configuration {
    adjustment_type         = "ExactCapacity"
    metric_aggregation_type = "Maximum"
    cooldown                = 0 # the dispatcher applies its own cooldown

    dynamic "step_adjustment" {
      for_each = local.counts

      content {
        metric_interval_lower_bound = step_adjustment.key == 0 ? 0 : local.counts[step_adjustment.key - 1] + 0.5
        metric_interval_upper_bound = step_adjustment.key == local.steps - 1 ? null : step_adjustment.value + 0.5
        scaling_adjustment          = max(var.scaling.min, step_adjustment.value)
      }
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "work" {
  alarm_name          = "${local.full}-work"
  alarm_description   = "There are desired workers for ${join(", ", local.names)}. Sets the number of workers; needs no attention."
  namespace           = var.metric_namespace
  metric_name         = "DesiredWorkers"
  dimensions          = { Installation = var.name, Pool = var.fleet }
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = 1
  threshold           = 0
  comparison_operator = "GreaterThanThreshold"
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_appautoscaling_policy.work.arn]
  tags                = var.tags
}

# Scales in to min after some minutes without desired workers.
resource "aws_appautoscaling_policy" "sleep" {
  name               = "${local.full}-sleep"
  policy_type        = "StepScaling"
  service_namespace  = aws_appautoscaling_target.this.service_namespace
  resource_id        = aws_appautoscaling_target.this.resource_id
  scalable_dimension = aws_appautoscaling_target.this.scalable_dimension

  step_scaling_policy_configuration {
    adjustment_type         = "ExactCapacity"
    metric_aggregation_type = "Maximum"
    cooldown                = 60

    step_adjustment {
      metric_interval_upper_bound = 0
      scaling_adjustment          = var.scaling.min
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "sleep" {
  alarm_name          = "${local.full}-nothing-left"
  alarm_description   = "No desired workers for ${var.scaling.idle_minutes} minutes. Scales in to min; needs no attention."
  namespace           = var.metric_namespace
  metric_name         = "DesiredWorkers"
  dimensions          = { Installation = var.name, Pool = var.fleet }
  statistic           = "Maximum"
  period              = 60
  evaluation_periods  = var.scaling.idle_minutes
  threshold           = 0
  comparison_operator = "LessThanOrEqualToThreshold"
  treat_missing_data  = "notBreaching" # a dispatcher that reports nothing is no reason to stop workers
  alarm_actions       = [aws_appautoscaling_policy.sleep.arn]
  tags                = var.tags
}
