# One name for the gateways of several regions. Each region is an installation of its own, with its own balancer; this
# module only answers DNS queries, so it belongs in a root of its own, whose state does not depend on one of the regions.
#
# Records are CNAMEs rather than aliases, since an alias has no TTL of its own. The name can't be the zone's apex.

locals {
  # No record is safer than a record of weight 0: Route 53 answers with those when all others are unhealthy.
  serving = { for region, one in var.regions : region => one if lookup(var.weights, region, 1) > 0 }
}

# A region without callers is checked too, so that its state is known before it gets callers again. Three failed checks
# make a region unhealthy.
resource "aws_route53_health_check" "this" {
  for_each = var.regions

  type = each.value.alarm_name == null ? "HTTPS" : "CLOUDWATCH_METRIC"

  fqdn              = each.value.alarm_name == null ? each.value.dns_name : null
  port              = each.value.alarm_name == null ? 443 : null
  resource_path     = each.value.alarm_name == null ? "/readyz" : null
  failure_threshold = each.value.alarm_name == null ? 3 : null
  request_interval  = each.value.alarm_name == null ? 30 : null

  # The alarms of a lost region can't be read.
  cloudwatch_alarm_name           = each.value.alarm_name
  cloudwatch_alarm_region         = each.value.alarm_name == null ? null : each.key
  insufficient_data_health_status = each.value.alarm_name == null ? null : "Unhealthy"

  tags = merge(var.tags, { Name = "${var.name} ${each.key}" })
}

resource "aws_route53_record" "this" {
  for_each = local.serving

  zone_id         = var.zone_id
  name            = var.name
  type            = "CNAME"
  ttl             = var.ttl
  records         = [each.value.dns_name]
  set_identifier  = each.key
  health_check_id = aws_route53_health_check.this[each.key].id

  dynamic "weighted_routing_policy" {
    for_each = var.policy == "weighted" ? [lookup(var.weights, each.key, 1)] : []

    content {
      weight = weighted_routing_policy.value
    }
  }

  dynamic "latency_routing_policy" {
    for_each = var.policy == "latency" ? [each.key] : []

    content {
      region = latency_routing_policy.value
    }
  }
}
