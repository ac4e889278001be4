mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name          = "tokenmill"
  vpc_id        = "vpc-1"
  vpc_cidr      = "10.64.0.0/16"
  subnet_ids    = ["subnet-a", "subnet-b"]
  image         = "000000000000.dkr.ecr.eu-central-1.amazonaws.com/tokenmill-control@sha256:0000"
  bucket_arn    = "arn:aws:s3:::answers"
  intake_policy = "{}"
  environment   = { TOKENMILL_ROOT = "s3://answers" }
  secrets       = { TOKENMILL_REDIS_URL = "arn:aws:secretsmanager:eu-central-1:000000000000:secret:redis" }
}

run "without_a_gateway" {
  assert {
    condition     = keys(aws_ecs_service.this) == ["dispatcher", "intake"] && length(aws_lb.gateway) == 0
    error_message = "there is HTTP without var.gateway"
  }

  assert {
    condition     = alltrue([for service in aws_ecs_service.this : !service.network_configuration[0].assign_public_ip])
    error_message = "a process has a public address"
  }

  assert {
    condition = alltrue([
      for task in aws_ecs_task_definition.this :
      jsondecode(task.container_definitions)[0].readonlyRootFilesystem && jsondecode(task.container_definitions)[0].user == "10001:10001"
    ])
    error_message = "a container may write to its image, or is root"
  }

  assert {
    condition = alltrue([
      for task in aws_ecs_task_definition.this :
      !strcontains(jsonencode(jsondecode(task.container_definitions)[0].environment), "REDIS")
    ])
    error_message = "a task definition contains a secret"
  }
}

run "each_has_a_health_check" {
  assert {
    condition = alltrue([
      for name, task in aws_ecs_task_definition.this :
      strcontains(join(" ", jsondecode(task.container_definitions)[0].healthCheck.command), ":${output.processes[name].environment.TOKENMILL_METRICS__PORT}/metrics")
    ])
    error_message = "a process that hangs is never replaced"
  }
}

run "fleets_are_pools" {
  variables {
    fleets = { gpu = { models = ["llama=s3://weights/llama", "embed=s3://weights/embed"], scaling = { max = 40 } } }
  }

  assert {
    condition = jsondecode(one([
      for variable in jsondecode(aws_ecs_task_definition.this["dispatcher"].container_definitions)[0].environment :
      variable.value if variable.name == "TOKENMILL_AUTOSCALE__POOLS"
      ])) == {
      gpu = { models = ["llama", "embed"], role = "both", limits = { min_workers = 0, max_workers = 40, cold_start_seconds = 300, standard_target_seconds = 3600 } }
    }
    error_message = "the dispatcher has no pool for the fleet, or other limits than the fleet's"
  }
}

run "roles_are_pools_of_their_own" {
  variables {
    fleets = {
      prompts = { models = ["llama=s3://weights/llama"], role = "prefill", scaling = { max = 2 } }
      answers = { models = ["llama=s3://weights/llama"], role = "decode", scaling = { max = 6 } }
      embed   = { models = ["embed=s3://weights/embed"], scaling = { max = 1 } }
    }
  }

  assert {
    condition = {
      for name, pool in jsondecode(output.processes["dispatcher"].environment.TOKENMILL_AUTOSCALE__POOLS) : name => pool.role
    } == { prompts = "prefill", answers = "decode", embed = "both" }
    error_message = "the dispatcher counts a fleet's workers as another role's"
  }
}

run "a_role_alone" {
  command = plan

  variables {
    fleets = { prompts = { models = ["llama=s3://weights/llama"], role = "prefill", scaling = { max = 2 } } }
  }

  expect_failures = [var.fleets]
}

run "a_model_in_two_fleets" {
  command = plan

  variables {
    fleets = {
      one     = { models = ["llama=s3://weights/llama"], scaling = { max = 2 } }
      answers = { models = ["llama=s3://weights/llama"], role = "decode", scaling = { max = 6 } }
    }
  }

  expect_failures = [var.fleets]
}

run "prefixes_of_two_tenants" {
  variables {
    prefixes = ["incoming/", "team-a/incoming/"]
  }

  assert {
    condition = alltrue([
      for name in ["intake", "dispatcher"] : alltrue([
        for prefix in ["incoming", "team-a/incoming"] :
        contains(one([for statement in data.aws_iam_policy_document.task[name].statement : statement.resources if statement.sid == "Read"]), "arn:aws:s3:::answers/${prefix}/*")
      ])
    ])
    error_message = "a process may not read a tenant's dropped files"
  }
}

run "with_a_gateway" {
  variables {
    gateway = {
      certificate_arn  = "arn:aws:acm:eu-central-1:000000000000:certificate/0"
      allowed_cidrs    = ["10.0.0.0/8"]
      balancer_subnets = ["subnet-a", "subnet-b"]
    }
  }

  assert {
    condition     = aws_lb.gateway[0].internal
    error_message = "the internet reaches the balancer"
  }

  # Otherwise the balancer would sometimes send a request on a connection that is being closed.
  assert {
    condition     = aws_lb.gateway[0].idle_timeout < tonumber(output.processes["gateway"].environment.TOKENMILL_GATEWAY__KEEP_ALIVE_SECONDS)
    error_message = "the gateway closes connections before the balancer does"
  }

  assert {
    condition     = aws_lb.gateway[0].idle_timeout > tonumber(output.processes["gateway"].environment.TOKENMILL_GATEWAY__REQUEST_TIMEOUT_SECONDS)
    error_message = "the balancer times out before the gateway does"
  }

  assert {
    condition     = tonumber(aws_lb_target_group.gateway[0].deregistration_delay) <= output.processes["gateway"].stop
    error_message = "a gateway is killed while the balancer still waits for its answers"
  }

  assert {
    condition     = output.processes["gateway"].environment.TOKENMILL_GATEWAY__AUTH == "keys"
    error_message = "a gateway answers without a key"
  }
}
