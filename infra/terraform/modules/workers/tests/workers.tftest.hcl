mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name        = "tokenmill"
  fleet       = "gpu"
  vpc_id      = "vpc-1"
  vpc_cidr    = "10.64.0.0/16"
  subnet_ids  = ["subnet-a", "subnet-b"]
  image       = "000000000000.dkr.ecr.eu-central-1.amazonaws.com/tokenmill-worker@sha256:0000"
  models      = ["llama=s3://weights/llama", "embed=s3://weights/embed"]
  bucket_arn  = "arn:aws:s3:::answers"
  environment = { TOKENMILL_ROOT = "s3://answers" }
  secrets     = { TOKENMILL_REDIS_URL = "arn:aws:secretsmanager:eu-central-1:000000000000:secret:redis" }

  pools = {
    steady = { purchase = "on_demand", instance_types = ["g6.xlarge"], max_instances = 2, base = 1 }
    spot   = { purchase = "spot", instance_types = ["g6.xlarge", "g5.xlarge"], max_instances = 6 }
  }

  scaling = { min = 0, max = 8 }
}

run "eight_workers" {
  # One desired worker starts one, two start two, and more than max start all.
  assert {
    condition = {
      for step in aws_appautoscaling_policy.work.step_scaling_policy_configuration[0].step_adjustment :
      step.scaling_adjustment => "${step.metric_interval_lower_bound}-${coalesce(step.metric_interval_upper_bound, "all")}"
      } == {
      1 = "0-1.5", 2 = "1.5-2.5", 3 = "2.5-3.5", 4 = "3.5-4.5"
      5 = "4.5-5.5", 6 = "5.5-6.5", 7 = "6.5-7.5", 8 = "7.5-all"
    }
    error_message = "not a step for each worker, or a number of desired workers isn't in the middle of its step"
  }

  assert {
    condition = alltrue([for alarm in [aws_cloudwatch_metric_alarm.work, aws_cloudwatch_metric_alarm.sleep] :
      alarm.metric_name == "DesiredWorkers" && alarm.dimensions == tomap({ Installation = "tokenmill", Pool = "gpu" })
    ])
    error_message = "the fleet does not scale by its desired workers"
  }

  assert {
    condition     = alltrue([for group in aws_autoscaling_group.this : group.protect_from_scale_in && group.min_size == 0])
    error_message = "a busy machine could be terminated, or an idle one is kept"
  }

  assert {
    condition     = [for name, group in aws_autoscaling_group.this : name if group.mixed_instances_policy[0].instances_distribution[0].on_demand_percentage_above_base_capacity == 0] == ["spot"]
    error_message = "a pool buys on demand instead of spot, or the reverse"
  }

  assert {
    condition     = output.process.environment.TOKENMILL_SPOT_NOTICE == "true" && output.process.stop < 120
    error_message = "a worker ignores the spot interruption notice, or stops too late"
  }

  assert {
    condition     = alltrue([for template in aws_launch_template.this : template.metadata_options[0].http_tokens == "required" && template.block_device_mappings[0].ebs[0].encrypted == "true"])
    error_message = "instance metadata is open to all, or a disk is not encrypted"
  }

  assert {
    condition     = jsondecode(aws_ecs_task_definition.this.container_definitions)[0].readonlyRootFilesystem && jsondecode(aws_ecs_task_definition.this.container_definitions)[0].user == "10001:10001"
    error_message = "the container may write to its image, or is root"
  }
}

run "the_worker_image_chooses_its_engine" {
  assert {
    condition     = jsondecode(aws_ecs_task_definition.this.container_definitions)[0].image == var.image
    error_message = "not the image of workers"
  }

  assert {
    condition     = output.process.environment.TOKENMILL_ENGINE == "auto" && length([for name in keys(output.process.environment) : name if startswith(name, "TOKENMILL_VLLM")]) == 0
    error_message = "an engine is set that was not chosen"
  }

  assert {
    condition     = !can(jsondecode(aws_ecs_task_definition.this.container_definitions)[0].linuxParameters.sharedMemorySize)
    error_message = "shared memory that no rank uses"
  }
}

run "vllm" {
  variables {
    engine          = "vllm"
    vllm_image      = "000000000000.dkr.ecr.eu-central-1.amazonaws.com/tokenmill-vllm@sha256:0000"
    engine_options  = { tensor_parallel_size = 2, gpu_memory_utilization = 0.9, enforce_eager = true }
    gpus_per_worker = 2
    environment     = { TOKENMILL_ROOT = "s3://answers", TOKENMILL_VLLM__ENFORCE_EAGER = "false" }
  }

  assert {
    condition     = jsondecode(aws_ecs_task_definition.this.container_definitions)[0].image == var.vllm_image
    error_message = "the container does not run vLLM's image"
  }

  assert {
    condition = { for one in jsondecode(aws_ecs_task_definition.this.container_definitions)[0].environment : one.name => one.value if one.name == "TOKENMILL_ENGINE" || startswith(one.name, "TOKENMILL_VLLM") } == {
      TOKENMILL_ENGINE                       = "vllm"
      TOKENMILL_VLLM__TENSOR_PARALLEL_SIZE   = "2"
      TOKENMILL_VLLM__GPU_MEMORY_UTILIZATION = "0.9"
      TOKENMILL_VLLM__ENFORCE_EAGER          = "true"
    }
    error_message = "the container lacks the engine or one of its options, or the environment of all processes overrides it"
  }

  assert {
    condition     = jsondecode(aws_ecs_task_definition.this.container_definitions)[0].linuxParameters.sharedMemorySize == 2048 && jsondecode(aws_ecs_task_definition.this.container_definitions)[0].linuxParameters.initProcessEnabled
    error_message = "the ranks of a model have too little shared memory, or there is no init process"
  }
}

run "vllm_needs_its_image" {
  command = plan

  variables {
    engine = "vllm"
  }

  expect_failures = [var.vllm_image]
}

run "latest_is_no_version_of_vllm_either" {
  command = plan

  variables {
    engine     = "vllm"
    vllm_image = "registry/tokenmill-vllm:latest"
  }

  expect_failures = [var.vllm_image]
}

run "no_such_engine" {
  command = plan

  variables {
    engine = "llama.cpp"
  }

  expect_failures = [var.engine]
}

run "the_engine_as_a_variable" {
  command = plan

  variables {
    environment = { TOKENMILL_ENGINE = "vllm" }
  }

  expect_failures = [var.environment]
}

run "options_without_vllm" {
  command = plan

  variables {
    engine_options = { tensor_parallel_size = 1 }
  }

  expect_failures = [var.engine_options]
}

run "options_have_the_names_of_engine_args" {
  command = plan

  variables {
    engine         = "vllm"
    vllm_image     = "registry/tokenmill-vllm:1"
    engine_options = { "--tensor-parallel-size" = 1 }
  }

  expect_failures = [var.engine_options]
}

run "more_ranks_than_gpus" {
  command = plan

  variables {
    engine         = "vllm"
    vllm_image     = "registry/tokenmill-vllm:1"
    engine_options = { tensor_parallel_size = 2 }
  }

  expect_failures = [var.engine_options]
}

# A policy takes 20 steps at most.
run "a_hundred_workers" {
  variables {
    scaling = { min = 3, max = 100 }
  }

  assert {
    condition     = length(aws_appautoscaling_policy.work.step_scaling_policy_configuration[0].step_adjustment) == 20
    error_message = "more steps than a policy takes"
  }

  assert {
    condition     = max([for step in aws_appautoscaling_policy.work.step_scaling_policy_configuration[0].step_adjustment : step.scaling_adjustment]...) == 100
    error_message = "the largest step isn't all workers"
  }

  assert {
    condition     = min([for step in aws_appautoscaling_policy.work.step_scaling_policy_configuration[0].step_adjustment : step.scaling_adjustment]...) == 5
    error_message = "the smallest step isn't a twentieth of max"
  }
}

run "no_room_for_a_second_one" {
  command = plan

  variables {
    pools   = { one = { purchase = "on_demand", instance_types = ["g6.xlarge"], max_instances = 1 } }
    scaling = { max = 1 }
  }

  expect_failures = [aws_ecs_service.this]
}

run "latest_is_no_version" {
  command = plan

  variables {
    image = "registry/tokenmill-worker:latest"
  }

  expect_failures = [var.image]
}

run "workers_of_both_roles" {
  variables {
    kv_transfer = { port = 9300, security_group_id = "sg-kv" }
  }

  assert {
    condition = !contains(output.process.command, "--role") && jsondecode(aws_ecs_task_definition.this.container_definitions)[0].portMappings == [] && alltrue([
      for name in keys(output.process.environment) : !startswith(name, "TOKENMILL_KV_TRANSFER")
    ])
    error_message = "a worker without a role listens"
  }

  assert {
    condition     = alltrue([for template in aws_launch_template.this : !contains(template.network_interfaces[0].security_groups, "sg-kv")])
    error_message = "a worker without a role reaches KV blocks"
  }
}

run "prefill" {
  variables {
    role        = "prefill"
    kv_transfer = { port = 9300, security_group_id = "sg-kv" }
    options     = ["--quantize", "fp8"]
  }

  assert {
    condition     = output.process.command == ["worker", "--model", "llama=s3://weights/llama", "--model", "embed=s3://weights/embed", "--role", "prefill", "--quantize", "fp8"]
    error_message = "the container computes whole requests"
  }

  assert {
    condition     = output.process.environment.TOKENMILL_KV_TRANSFER__PORT == "9300" && output.process.environment.TOKENMILL_KV_TRANSFER__HOST == "0.0.0.0"
    error_message = "the worker listens where no decode worker reaches it"
  }

  assert {
    condition     = [for mapping in jsondecode(aws_ecs_task_definition.this.container_definitions)[0].portMappings : mapping.hostPort] == [9300]
    error_message = "ECS could place two workers on a machine, and the second one can't listen"
  }

  assert {
    condition     = alltrue([for template in aws_launch_template.this : template.network_interfaces[0].security_groups == toset([aws_security_group.this.id, "sg-kv"])])
    error_message = "the security groups don't let decode workers in, or let others in"
  }
}

run "decode" {
  variables {
    role        = "decode"
    kv_transfer = { port = 9300, security_group_id = "sg-kv" }
  }

  assert {
    condition     = slice(output.process.command, 5, 7) == ["--role", "decode"]
    error_message = "the container computes whole requests"
  }

  assert {
    condition     = jsondecode(aws_ecs_task_definition.this.container_definitions)[0].portMappings == []
    error_message = "a decode worker, which does not listen, keeps others off its machine"
  }

  assert {
    condition     = alltrue([for template in aws_launch_template.this : contains(template.network_interfaces[0].security_groups, "sg-kv")])
    error_message = "the worker does not reach prefill workers"
  }
}

run "no_such_role" {
  command = plan

  variables {
    role        = "prompts"
    kv_transfer = { port = 9300, security_group_id = "sg-kv" }
  }

  expect_failures = [var.role]
}

run "a_role_needs_a_port" {
  command = plan

  variables {
    role = "decode"
  }

  expect_failures = [var.role]
}

run "vllm_has_no_roles" {
  command = plan

  variables {
    role        = "decode"
    engine      = "vllm"
    vllm_image  = "registry/tokenmill-vllm:1"
    kv_transfer = { port = 9300, security_group_id = "sg-kv" }
  }

  expect_failures = [var.role]
}

run "several_gpus_have_no_roles" {
  command = plan

  variables {
    role            = "prefill"
    gpus_per_worker = 2
    kv_transfer     = { port = 9300, security_group_id = "sg-kv" }
  }

  expect_failures = [var.role]
}

run "the_role_as_an_option" {
  command = plan

  variables {
    options = ["--role=prefill"]
  }

  expect_failures = [var.options]
}

run "the_port_as_a_variable" {
  command = plan

  variables {
    environment = { TOKENMILL_KV_TRANSFER__PORT = "9300" }
  }

  expect_failures = [var.environment]
}
