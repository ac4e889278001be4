# The balancer terminates TLS. Its idle timeout exceeds the longest request. The gateway keeps connections open longer
# than the balancer does; otherwise the balancer would sometimes send a request on a connection that is being closed.

resource "aws_security_group" "balancer" {
  count = var.gateway == null ? 0 : 1

  name_prefix = "${var.name}-balancer-"
  description = "HTTPS from those who may use ${var.name}"
  vpc_id      = var.vpc_id
  tags        = merge(var.tags, { Name = "${var.name}-balancer" })

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "callers" {
  for_each = toset(try(var.gateway.allowed_cidrs, []))

  security_group_id = aws_security_group.balancer[0].id
  description       = "HTTPS"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = each.value
}

resource "aws_vpc_security_group_egress_rule" "balancer" {
  count = var.gateway == null ? 0 : 1

  security_group_id            = aws_security_group.balancer[0].id
  description                  = "Gateways"
  ip_protocol                  = "tcp"
  from_port                    = local.port
  to_port                      = local.port
  referenced_security_group_id = aws_security_group.this["gateway"].id
}

resource "aws_vpc_security_group_ingress_rule" "gateway" {
  count = var.gateway == null ? 0 : 1

  security_group_id            = aws_security_group.this["gateway"].id
  description                  = "The balancer"
  ip_protocol                  = "tcp"
  from_port                    = local.port
  to_port                      = local.port
  referenced_security_group_id = aws_security_group.balancer[0].id
}

resource "aws_lb" "gateway" {
  # checkov:skip=CKV_AWS_150: on, unless gateway.delete_protection is set to false before terraform destroy

  count = var.gateway == null ? 0 : 1

  name                       = "${var.name}-gateway"
  load_balancer_type         = "application"
  internal                   = var.gateway.internal
  subnets                    = var.gateway.balancer_subnets
  security_groups            = [aws_security_group.balancer[0].id]
  idle_timeout               = local.request_limit + 30
  drop_invalid_header_fields = true
  desync_mitigation_mode     = "strictest"
  enable_deletion_protection = var.gateway.delete_protection
  tags                       = var.tags

  dynamic "access_logs" {
    for_each = var.gateway.access_log_bucket == null ? [] : [var.gateway.access_log_bucket]

    content {
      enabled = true
      bucket  = access_logs.value
      prefix  = var.name
    }
  }
}

resource "aws_lb_target_group" "gateway" {
  count = var.gateway == null ? 0 : 1

  name_prefix                   = "tm-gw-"
  vpc_id                        = var.vpc_id
  target_type                   = "ip"
  protocol                      = "HTTP"
  port                          = local.port
  deregistration_delay          = local.drain_seconds
  load_balancing_algorithm_type = "least_outstanding_requests" # streams are long, so round robin is unfair
  tags                          = var.tags

  # A gateway that is being stopped answers 503, and gets no new requests.
  health_check {
    path                = "/readyz"
    matcher             = "200"
    interval            = 10
    timeout             = 5
    healthy_threshold   = 2
    unhealthy_threshold = 2
  }

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_lb_listener" "https" {
  count = var.gateway == null ? 0 : 1

  load_balancer_arn = aws_lb.gateway[0].arn
  protocol          = "HTTPS"
  port              = 443
  ssl_policy        = "ELBSecurityPolicy-TLS13-1-2-2021-06"
  certificate_arn   = var.gateway.certificate_arn
  tags              = var.tags

  default_action {
    type             = "forward"
    target_group_arn = aws_lb_target_group.gateway[0].arn
  }
}
