mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name                   = "tokenmill"
  queue_name             = "tokenmill-drops"
  dead_letter_queue_name = "tokenmill-drops-dead"
  redis_node_ids         = ["tokenmill-redis-001"]
  control                = { cluster_name = "tokenmill-control", service_names = ["dispatcher", "intake"] }
  fleets                 = { gpu = { model_names = ["owner/llama", "embed"] } }
}

run "the_least" {
  assert {
    condition     = sort(keys(aws_cloudwatch_metric_alarm.backlog)) == tolist(["gpu-embed", "gpu-owner/llama"])
    error_message = "no alarm fires when a model's backlog is too long"
  }

  assert {
    condition = alltrue([
      for alarm in concat(
        values(aws_cloudwatch_metric_alarm.backlog), values(aws_cloudwatch_metric_alarm.not_running),
        values(aws_cloudwatch_metric_alarm.redis_memory),
        [aws_cloudwatch_metric_alarm.dead_letters, aws_cloudwatch_metric_alarm.drops_wait, aws_cloudwatch_metric_alarm.silence],
      ) : alarm.alarm_actions == toset([aws_sns_topic.alarms.arn])
    ])
    error_message = "an alarm does not notify the topic"
  }

  assert {
    condition     = aws_cloudwatch_metric_alarm.silence.treat_missing_data == "breaching" && alltrue([for alarm in aws_cloudwatch_metric_alarm.not_running : alarm.treat_missing_data == "breaching"])
    error_message = "a process that sends no metrics raises no alarm"
  }

  assert {
    condition     = length(jsondecode(aws_cloudwatch_dashboard.this.dashboard_body).widgets) == 8
    error_message = "the dashboard lacks a graph"
  }

  assert {
    condition     = length(aws_budgets_budget.month) + length(aws_cloudwatch_metric_alarm.no_gateway) + length(aws_cloudwatch_metric_alarm.kafka_disk) == 0
    error_message = "there are alarms of resources that do not exist"
  }

  assert {
    condition     = output.gateway_alarm == null
    error_message = "the output names an alarm that does not exist"
  }
}

run "two_fleets_of_a_model" {
  variables {
    fleets = { prompts = { model_names = ["llama"] }, answers = { model_names = ["llama"] } }
  }

  assert {
    condition     = [for metric in jsondecode(aws_cloudwatch_dashboard.this.dashboard_body).widgets[0].properties.metrics : metric[5]] == ["llama"]
    error_message = "a graph shows the model twice"
  }
}

run "with_everything" {
  variables {
    balancer       = { arn_suffix = "app/gateway/0", target_group_suffix = "targetgroup/gateway/0" }
    kafka          = { cluster_name = "tokenmill", brokers = 3 }
    monthly_budget = 1000
    budget_tag     = "Installation=tokenmill"
    emails         = ["ops@example.com"]
  }

  assert {
    condition     = keys(aws_cloudwatch_metric_alarm.kafka_disk) == ["broker-1", "broker-2", "broker-3"] && length(aws_cloudwatch_metric_alarm.no_gateway) == 1
    error_message = "a broker's disk, or the gateways, have no alarm"
  }

  assert {
    condition     = output.gateway_alarm == "tokenmill-no-gateway"
    error_message = "the module dns has no alarm for its health check"
  }

  assert {
    condition     = one([for filter in aws_budgets_budget.month[0].cost_filter : filter.values]) == tolist(["user:Installation$tokenmill"])
    error_message = "the budget counts something else"
  }

  assert {
    condition     = length(jsondecode(aws_cloudwatch_dashboard.this.dashboard_body).widgets) == 9
    error_message = "the dashboard lacks the HTTP graph"
  }
}
