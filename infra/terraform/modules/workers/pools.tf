# Machines. ECS starts instances for the tasks that it can't place, and terminates empty instances.

resource "aws_launch_template" "this" {
  for_each = var.pools

  name                   = "${local.full}-${each.key}"
  image_id               = local.ami
  update_default_version = true
  ebs_optimized          = true
  tags                   = var.tags

  user_data = base64encode(templatefile("${path.module}/user_data.sh.tftpl", {
    cluster      = aws_ecs_cluster.this.name
    stop_seconds = local.stop_seconds
  }))

  iam_instance_profile {
    arn = aws_iam_instance_profile.instance.arn
  }

  # IMDSv2 only. One hop reaches tasks on the host's network, but no container with a network of its own.
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "disabled"
  }

  network_interfaces {
    associate_public_ip_address = false
    delete_on_termination       = true
    security_groups             = concat([aws_security_group.this.id], local.has_role ? [var.kv_transfer.security_group_id] : [])
  }

  block_device_mappings {
    device_name = "/dev/xvda"

    ebs {
      volume_size           = var.root_volume_gib
      volume_type           = "gp3"
      encrypted             = true
      delete_on_termination = true
    }
  }

  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume", "network-interface"])

    content {
      resource_type = tag_specifications.value
      tags          = merge(var.tags, { Name = "${local.full}-${each.key}" })
    }
  }
}

resource "aws_autoscaling_group" "this" {
  for_each = var.pools

  name                      = "${local.full}-${each.key}"
  vpc_zone_identifier       = var.subnet_ids
  min_size                  = 0
  max_size                  = each.value.max_instances
  desired_capacity          = 0
  protect_from_scale_in     = true # ECS removes the protection of instances without tasks
  capacity_rebalance        = each.value.purchase == "spot"
  max_instance_lifetime     = var.max_instance_days * 86400
  default_instance_warmup   = 300
  health_check_type         = "EC2"
  health_check_grace_period = 300
  wait_for_capacity_timeout = "0"

  mixed_instances_policy {
    instances_distribution {
      on_demand_base_capacity                  = 0
      on_demand_percentage_above_base_capacity = each.value.purchase == "spot" ? 0 : 100
      on_demand_allocation_strategy            = "prioritized"
      spot_allocation_strategy                 = "price-capacity-optimized"
    }

    launch_template {
      launch_template_specification {
        launch_template_id = aws_launch_template.this[each.key].id
        version            = "$Latest"
      }

      dynamic "override" {
        for_each = each.value.instance_types

        content {
          instance_type = override.value
        }
      }
    }
  }

  # ECS sets this tag; without this block each plan would remove it.
  tag {
    key                 = "AmazonECSManaged"
    value               = "true"
    propagate_at_launch = true
  }

  dynamic "tag" {
    for_each = merge(var.tags, { Name = "${local.full}-${each.key}" })

    content {
      key                 = tag.key
      value               = tag.value
      propagate_at_launch = true
    }
  }

  lifecycle {
    ignore_changes = [desired_capacity]
  }
}

resource "aws_ecs_capacity_provider" "this" {
  for_each = var.pools

  name = "${local.full}-${each.key}"
  tags = var.tags

  auto_scaling_group_provider {
    auto_scaling_group_arn         = aws_autoscaling_group.this[each.key].arn
    managed_termination_protection = "ENABLED"
    managed_draining               = "ENABLED"

    managed_scaling {
      status                    = "ENABLED"
      target_capacity           = 100
      minimum_scaling_step_size = 1
      maximum_scaling_step_size = each.value.max_instances
      instance_warmup_period    = 300
    }
  }
}

resource "aws_ecs_cluster_capacity_providers" "this" {
  cluster_name       = aws_ecs_cluster.this.name
  capacity_providers = [for provider in aws_ecs_capacity_provider.this : provider.name]
}
