mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name               = "tokenmill"
  availability_zones = ["eu-central-1a", "eu-central-1b", "eu-central-1c"]
}

run "no_way_out" {
  variables {
    interface_endpoints = ["sqs", "logs"]
  }

  assert {
    condition     = length(aws_internet_gateway.this) + length(aws_nat_gateway.this) + length(aws_subnet.public) + length(aws_route.private) == 0
    error_message = "there is a route to the internet"
  }

  assert {
    condition     = sort([for endpoint in aws_vpc_endpoint.interface : endpoint.service_name]) == tolist(["com.amazonaws.eu-central-1.logs", "com.amazonaws.eu-central-1.sqs"])
    error_message = "a service can't be reached"
  }

  assert {
    condition     = alltrue([for endpoint in aws_vpc_endpoint.interface : length(endpoint.subnet_ids) == 2])
    error_message = "endpoints are in more zones than endpoint_zones, and each costs money"
  }

  assert {
    condition     = sort([for subnet in aws_subnet.private : subnet.cidr_block]) == tolist(["10.64.0.0/20", "10.64.16.0/20", "10.64.32.0/20"])
    error_message = "subnets overlap, or are too small"
  }
}

run "one_gateway_for_all" {
  variables {
    nat = "single"
  }

  assert {
    condition     = length(aws_nat_gateway.this) == 1 && length(aws_route.private) == 3
    error_message = "a zone has no route through the gateway"
  }
}

run "a_gateway_for_each_zone" {
  variables {
    nat = "per_zone"
  }

  assert {
    condition     = length(aws_nat_gateway.this) == 3 && length(aws_route.private) == 3
    error_message = "a zone routes through another zone's gateway"
  }
}

run "zones_are_different" {
  command = plan

  variables {
    availability_zones = ["eu-central-1a", "eu-central-1a"]
  }

  expect_failures = [var.availability_zones]
}

run "no_worker_has_a_role" {
  command = plan

  assert {
    condition     = length(aws_security_group.kv_transfer) + length(aws_vpc_security_group_ingress_rule.kv_transfer) + length(aws_vpc_security_group_egress_rule.kv_transfer) == 0 && output.kv_transfer == null
    error_message = "a port is open that no worker uses"
  }
}

run "kv_transfer" {
  variables {
    kv_transfer_port = 9300
  }

  assert {
    condition = alltrue([
      for rule in concat(aws_vpc_security_group_ingress_rule.kv_transfer, aws_vpc_security_group_egress_rule.kv_transfer) :
      rule.ip_protocol == "tcp" && rule.from_port == 9300 && rule.to_port == 9300
    ])
    error_message = "other ports are open, or not this one"
  }

  assert {
    condition = alltrue([
      for rule in concat(aws_vpc_security_group_ingress_rule.kv_transfer, aws_vpc_security_group_egress_rule.kv_transfer) :
      rule.security_group_id == aws_security_group.kv_transfer[0].id && rule.referenced_security_group_id == rule.security_group_id
      && rule.cidr_ipv4 == null && rule.cidr_ipv6 == null && rule.prefix_list_id == null
    ])
    error_message = "others than the group's members reach the port, or the members don't"
  }

  assert {
    condition     = length(aws_vpc_security_group_ingress_rule.kv_transfer) == 1 && length(aws_vpc_security_group_egress_rule.kv_transfer) == 1
    error_message = "the port is closed for one direction"
  }

  assert {
    condition     = output.kv_transfer == { port = 9300, security_group_id = aws_security_group.kv_transfer[0].id }
    error_message = "workers get another port or group"
  }
}

run "a_port_of_outgoing_connections" {
  command = plan

  variables {
    kv_transfer_port = 32768
  }

  expect_failures = [var.kv_transfer_port]
}

run "a_reserved_port" {
  command = plan

  variables {
    kv_transfer_port = 1023
  }

  expect_failures = [var.kv_transfer_port]
}
