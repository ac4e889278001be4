# How many workers: by the seconds of work that wait for each, never by how busy a GPU is. A GPU is as busy with the last
# row of a night's job as with the first of a million.

locals {
  by_model = { for index, name in local.names : "m${index}" => name }
  # Several models of one fleet wait for the same workers.
  total = join(" + ", keys(local.by_model))
}

resource "aws_appautoscaling_target" "this" {
  service_namespace  = "ecs"
  resource_id        = "service/${aws_ecs_cluster.this.name}/${aws_ecs_service.this.name}"
  scalable_dimension = "ecs:service:DesiredCount"
  min_capacity       = var.scaling.min
  max_capacity       = var.scaling.max
  tags               = var.tags
}

# Between one and the most: so many that what is left takes target_seconds.
resource "aws_appautoscaling_policy" "backlog" {
  name               = "${local.full}-backlog-seconds"
  policy_type        = "TargetTrackingScaling"
  service_namespace  = aws_appautoscaling_target.this.service_namespace
  resource_id        = aws_appautoscaling_target.this.resource_id
  scalable_dimension = aws_appautoscaling_target.this.scalable_dimension

  target_tracking_scaling_policy_configuration {
    target_value       = var.scaling.target_seconds
    scale_out_cooldown = var.scaling.scale_out_cooldown
    scale_in_cooldown  = var.scaling.scale_in_cooldown

    customized_metric_specification {
      dynamic "metrics" {
        for_each = local.by_model

        content {
          id          = metrics.key
          return_data = false

          metric_stat {
            stat = "Maximum"

            metric {
              namespace   = var.metric_namespace
              metric_name = "BacklogSeconds"

              dimensions {
                name  = "Installation"
                value = var.name
              }

              dimensions {
                name  = "Model"
                value = metrics.value
              }
            }
          }
        }
      }

      metrics {
        id          = "backlog"
        label       = "Seconds of work for those who run"
        expression  = local.total
        return_data = true
      }
    }
  }
}

# From none to one. Seconds of work for nobody can't be tracked, so this has an alarm of its own.
resource "aws_appautoscaling_policy" "wake" {
  name               = "${local.full}-wake"
  policy_type        = "StepScaling"
  service_namespace  = aws_appautoscaling_target.this.service_namespace
  resource_id        = aws_appautoscaling_target.this.resource_id
  scalable_dimension = aws_appautoscaling_target.this.scalable_dimension

  step_scaling_policy_configuration {
    adjustment_type         = "ExactCapacity"
    metric_aggregation_type = "Maximum"
    cooldown                = var.scaling.scale_out_cooldown

    step_adjustment {
      metric_interval_lower_bound = 0
      scaling_adjustment          = max(1, var.scaling.min)
    }
  }
}

resource "aws_cloudwatch_metric_alarm" "wake" {
  alarm_name          = "${local.full}-work-without-workers"
  alarm_description   = "Work waits for ${join(", ", local.names)}, and nobody does it. Starts the first worker."
  comparison_operator = "GreaterThanOrEqualToThreshold"
  threshold           = 1
  evaluation_periods  = 1
  treat_missing_data  = "notBreaching"
  alarm_actions       = [aws_appautoscaling_policy.wake.arn]
  tags                = var.tags

  dynamic "metric_query" {
    for_each = local.by_model

    content {
      id = metric_query.key

      metric {
        namespace   = var.metric_namespace
        metric_name = "BacklogTokens"
        dimensions  = { Installation = var.name, Model = metric_query.value }
        period      = 60
        stat        = "Maximum"
      }
    }
  }

  dynamic "metric_query" {
    for_each = local.by_model

    content {
      id = replace(metric_query.key, "m", "w")

      metric {
        namespace   = var.metric_namespace
        metric_name = "Workers"
        dimensions  = { Installation = var.name, Model = metric_query.value }
        period      = 60
        stat        = "Maximum"
      }
    }
  }

  metric_query {
    id          = "asleep"
    label       = "Work, and no worker"
    expression  = "IF((${local.total}) > 0 AND (${replace(local.total, "m", "w")}) < 1, 1, 0)"
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
        metric_name = "BacklogTokens"
        dimensions  = { Installation = var.name, Model = metric_query.value }
        period      = 60
        stat        = "Maximum"
      }
    }
  }

  metric_query {
    id          = "left"
    label       = "Tokens left"
    expression  = local.total
    return_data = true
  }
}
