# How many workers: by the seconds of work that wait, never by how busy a GPU is, which is as busy with the last row of a
# night's job as with the first of a million. The seconds are those of one worker, so workers that are still being started
# change nothing of the answer, and it is never overshot.

locals {
  by_model = { for index, name in local.names : "m${index}" => name }
  # Several models of one fleet wait for the same workers.
  total = join(" + ", [for id in keys(local.by_model) : "FILL(${id}, 0)"])

  # So many workers that what is left takes target_seconds. A policy has 20 steps at most, so a large fleet takes larger
  # ones: the last step is all of it.
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

# While there is work: the number that it needs, none to start with or not. As less is left, it needs fewer.
resource "aws_appautoscaling_policy" "work" {
  name               = "${local.full}-work"
  policy_type        = "StepScaling"
  service_namespace  = aws_appautoscaling_target.this.service_namespace
  resource_id        = aws_appautoscaling_target.this.resource_id
  scalable_dimension = aws_appautoscaling_target.this.scalable_dimension

  step_scaling_policy_configuration {
    adjustment_type         = "ExactCapacity"
    metric_aggregation_type = "Maximum"
    cooldown                = var.scaling.cooldown

    dynamic "step_adjustment" {
      for_each = local.counts

      content {
        metric_interval_lower_bound = step_adjustment.key == 0 ? 0 : local.counts[step_adjustment.key - 1] * var.scaling.target_seconds
        metric_interval_upper_bound = step_adjustment.key == local.steps - 1 ? null : step_adjustment.value * var.scaling.target_seconds
        scaling_adjustment          = max(var.scaling.min, step_adjustment.value)
      }
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "work" {
  alarm_name          = "${local.full}-work"
  alarm_description   = "There is work for ${join(", ", local.names)}. Not an alarm, but what sets the number of workers."
  comparison_operator = "GreaterThanThreshold"
  threshold           = 0
  evaluation_periods  = 1
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_appautoscaling_policy.work.arn]
  tags                = var.tags

  dynamic "metric_query" {
    for_each = local.by_model

    content {
      id = metric_query.key

      metric {
        namespace   = var.metric_namespace
        metric_name = "BacklogSeconds"
        dimensions  = { Installation = var.name, Model = metric_query.value }
        period      = 60
        stat        = "Maximum"
      }
    }
  }

  metric_query {
    id          = "work"
    label       = "Seconds of work for one worker"
    expression  = local.total
    return_data = true
  }
}

# Back to the least, when for a while nothing was left at all.
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
  alarm_description   = "Nothing was left to do for ${var.scaling.idle_minutes} minutes. Ends all workers but the least."
  comparison_operator = "LessThanOrEqualToThreshold"
  threshold           = 0
  evaluation_periods  = var.scaling.idle_minutes
  treat_missing_data  = "notBreaching" # a dispatcher that says nothing is no reason to end workers
  alarm_actions       = [aws_appautoscaling_policy.sleep.arn]
  tags                = var.tags

  dynamic "metric_query" {
    for_each = local.by_model

    content {
      id = metric_query.key

      metric {
        namespace   = var.metric_namespace
        metric_name = "BacklogSeconds"
        dimensions  = { Installation = var.name, Model = metric_query.value }
        period      = 60
        stat        = "Maximum"
      }
    }
  }

  metric_query {
    id          = "work"
    label       = "Seconds of work for one worker"
    expression  = local.total
    return_data = true
  }
}
