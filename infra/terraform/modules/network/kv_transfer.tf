# KV blocks of prompts, from prefill to decode workers. They are sent in the clear and only a ticket protects them, so
# the port is open between the machines of workers with a role, and to no address range.

locals {
  kv_transfer = var.kv_transfer_port[*]
}

resource "aws_security_group" "kv_transfer" {
  # checkov:skip=CKV2_AWS_5: the launch templates of the module workers have it, by the output kv_transfer

  count = length(local.kv_transfer)

  name_prefix = "${var.name}-kv-transfer-"
  description = "Workers with a role: KV blocks from each other"
  vpc_id      = aws_vpc.this.id
  tags        = merge(var.tags, { Name = "${var.name}-kv-transfer" })

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "kv_transfer" {
  count = length(local.kv_transfer)

  security_group_id            = aws_security_group.kv_transfer[0].id
  description                  = "Decode workers"
  ip_protocol                  = "tcp"
  from_port                    = var.kv_transfer_port
  to_port                      = var.kv_transfer_port
  referenced_security_group_id = aws_security_group.kv_transfer[0].id
}

resource "aws_vpc_security_group_egress_rule" "kv_transfer" {
  count = length(local.kv_transfer)

  security_group_id            = aws_security_group.kv_transfer[0].id
  description                  = "Prefill workers"
  ip_protocol                  = "tcp"
  from_port                    = var.kv_transfer_port
  to_port                      = var.kv_transfer_port
  referenced_security_group_id = aws_security_group.kv_transfer[0].id
}
