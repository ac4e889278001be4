mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name    = "llm.example.com"
  zone_id = "Z0123456789ABCDEFGHIJ"
  regions = {
    eu-central-1 = { dns_name = "eu.elb.amazonaws.com" }
    us-east-1    = { dns_name = "internal-us.elb.amazonaws.com", alarm_name = "tokenmill-no-gateway" }
  }
}

run "the_nearest_region" {
  assert {
    condition = alltrue([
      for region, record in aws_route53_record.this :
      record.set_identifier == region && record.latency_routing_policy[0].region == region && length(record.weighted_routing_policy) == 0
    ])
    error_message = "callers are not sent to the nearest region"
  }

  assert {
    condition     = { for region, record in aws_route53_record.this : region => one(record.records) } == { for region, one in var.regions : region => one.dns_name }
    error_message = "a region's record does not name its balancer"
  }

  assert {
    condition     = alltrue([for record in aws_route53_record.this : record.name == var.name && record.ttl == 60])
    error_message = "the regions have more than one name, or callers stay for long in a lost region"
  }
}

run "each_region_is_checked" {
  assert {
    condition     = alltrue([for region, record in aws_route53_record.this : record.health_check_id == aws_route53_health_check.this[region].id]) && length(distinct(values(output.health_check_ids))) == 2
    error_message = "a record does not depend on its own region's health"
  }

  assert {
    condition = (
      aws_route53_health_check.this["eu-central-1"].type == "HTTPS" &&
      aws_route53_health_check.this["eu-central-1"].fqdn == "eu.elb.amazonaws.com" &&
      aws_route53_health_check.this["eu-central-1"].resource_path == "/readyz"
    )
    error_message = "the check of a public balancer does not ask whether a gateway is ready"
  }

  # The checkers are on the internet and can't reach an internal balancer.
  assert {
    condition = (
      aws_route53_health_check.this["us-east-1"].type == "CLOUDWATCH_METRIC" &&
      aws_route53_health_check.this["us-east-1"].cloudwatch_alarm_name == "tokenmill-no-gateway" &&
      aws_route53_health_check.this["us-east-1"].cloudwatch_alarm_region == "us-east-1" &&
      aws_route53_health_check.this["us-east-1"].insufficient_data_health_status == "Unhealthy"
    )
    error_message = "an internal balancer is not checked by its alarm, or a region whose alarms are lost stays healthy"
  }
}

run "shares_by_weight" {
  variables {
    policy  = "weighted"
    weights = { eu-central-1 = 9 }
    ttl     = 30
  }

  assert {
    condition     = { for region, record in aws_route53_record.this : region => record.weighted_routing_policy[0].weight } == { eu-central-1 = 9, us-east-1 = 1 }
    error_message = "the shares are not the weights"
  }

  assert {
    condition     = alltrue([for record in aws_route53_record.this : record.ttl == 30 && length(record.latency_routing_policy) == 0])
    error_message = "the TTL is ignored, or there are two policies"
  }
}

run "a_region_is_taken_out" {
  variables {
    weights = { us-east-1 = 0 }
  }

  # Route 53 answers with records of weight 0 when all others are unhealthy.
  assert {
    condition     = keys(aws_route53_record.this) == ["eu-central-1"] && output.serving == ["eu-central-1"]
    error_message = "the region still has a record"
  }

  assert {
    condition     = keys(aws_route53_health_check.this) == ["eu-central-1", "us-east-1"]
    error_message = "the state of the region is not known before it gets callers again"
  }
}

run "by_weight_a_region_is_taken_out_too" {
  variables {
    policy  = "weighted"
    weights = { eu-central-1 = 0, us-east-1 = 5 }
  }

  assert {
    condition     = keys(aws_route53_record.this) == ["us-east-1"]
    error_message = "the region still has a record"
  }
}

run "no_region_is_left" {
  command = plan

  variables {
    weights = { eu-central-1 = 0, us-east-1 = 0 }
  }

  expect_failures = [var.weights]
}

run "a_weight_of_an_unknown_region" {
  command = plan

  variables {
    weights = { eu-west-1 = 1 }
  }

  expect_failures = [var.weights]
}

run "latency_has_no_shares" {
  command = plan

  variables {
    weights = { eu-central-1 = 9 }
  }

  expect_failures = [var.weights]
}

run "half_a_weight" {
  command = plan

  variables {
    policy  = "weighted"
    weights = { eu-central-1 = 0.5 }
  }

  expect_failures = [var.weights]
}

run "no_code_of_a_region" {
  command = plan

  variables {
    regions = { frankfurt = { dns_name = "eu.elb.amazonaws.com" } }
  }

  expect_failures = [var.regions]
}

run "an_unknown_policy" {
  command = plan

  variables {
    policy = "nearest"
  }

  expect_failures = [var.policy]
}

run "an_apex_and_hours_in_a_lost_region" {
  command = plan

  variables {
    name = "example.com"
    ttl  = 86400
  }

  expect_failures = [var.name, var.ttl]
}
