# Tests resources that a local AWS can't apply, MSK above all, and properties that hold for all values of the variables.
# No AWS API is called: the provider is a mock with the real one's schemas and checks.

mock_provider "aws" {
  source = "../../mocks"
}

variables {
  region             = "eu-central-1"
  availability_zones = ["eu-central-1a", "eu-central-1b", "eu-central-1c"]
  bucket_name        = "answers"
  weights_bucket     = "weights"
  control_image      = "000000000000.dkr.ecr.eu-central-1.amazonaws.com/tokenmill-control@sha256:0000"
  worker_image       = "000000000000.dkr.ecr.eu-central-1.amazonaws.com/tokenmill-worker@sha256:0000"
  emails             = ["ops@example.com"]
  monthly_budget     = 5000

  gateway = {
    certificate_arn = "arn:aws:acm:eu-central-1:000000000000:certificate/0"
    allowed_cidrs   = ["10.0.0.0/8"]
  }

  fleets = {
    chat = {
      models = ["llama=s3://weights/llama"]
      pools = {
        steady = { purchase = "on_demand", instance_types = ["g6.xlarge"], max_instances = 2, base = 1 }
        spot   = { purchase = "spot", instance_types = ["g6.xlarge", "g5.xlarge"], max_instances = 6 }
      }
      scaling = { min = 1, max = 8 }
    }
  }
}

run "an_installation_with_kafka" {
  assert {
    condition     = jsondecode(output.processes["intake"].environment.TOKENMILL_KAFKA__BOOTSTRAP_SERVERS)[2] == "b-3.mock:9098"
    error_message = "the intake has no address of Kafka"
  }

  assert {
    condition     = output.processes["intake"].environment.TOKENMILL_KAFKA__SASL_MECHANISM == "AWS_MSK_IAM"
    error_message = "Kafka is not reached by IAM"
  }

  assert {
    condition     = output.kafka_cluster_arn == "arn:aws:kafka:eu-central-1:000000000000:cluster/tokenmill/0"
    error_message = "the output kafka_cluster_arn lacks the cluster"
  }

  assert {
    condition     = output.gateway.arn_suffix == "app/mock/0"
    error_message = "the output gateway lacks the balancer"
  }

  assert {
    condition     = sort(keys(output.processes)) == tolist(["dispatcher", "gateway", "intake", "worker-chat"])
    error_message = "processes are missing, or too many"
  }
}

run "an_installation_without_kafka_and_http" {
  variables {
    kafka   = null
    gateway = null
  }

  assert {
    condition     = output.kafka_cluster_arn == null && output.gateway == null
    error_message = "there is a cluster, or a balancer, without a configuration for it"
  }

  assert {
    condition     = sort(keys(output.processes)) == tolist(["dispatcher", "intake", "worker-chat"])
    error_message = "processes are missing, or too many"
  }

  assert {
    condition     = length([for name in keys(output.processes["intake"].environment) : name if startswith(name, "TOKENMILL_KAFKA")]) == 0
    error_message = "the intake has settings of a Kafka that does not exist"
  }
}

run "a_fleet_with_vllm" {
  variables {
    vllm_image = "000000000000.dkr.ecr.eu-central-1.amazonaws.com/tokenmill-vllm@sha256:0000"

    fleets = {
      chat = {
        models  = ["llama=s3://weights/llama"]
        pools   = { steady = { purchase = "on_demand", instance_types = ["g6.xlarge"], max_instances = 2 } }
        scaling = { max = 2 }
      }
      large = {
        models          = ["qwen=s3://weights/qwen"]
        engine          = "vllm"
        engine_options  = { tensor_parallel_size = 4 }
        gpus_per_worker = 4
        pools           = { steady = { purchase = "on_demand", instance_types = ["g6.12xlarge"], max_instances = 2 } }
        scaling         = { max = 2 }
      }
    }
  }

  assert {
    condition     = { for name, process in output.processes : name => process.environment.TOKENMILL_ENGINE if startswith(name, "worker-") } == { worker-chat = "auto", worker-large = "vllm" }
    error_message = "a fleet has another one's engine"
  }

  assert {
    condition     = output.processes["worker-large"].environment.TOKENMILL_VLLM__TENSOR_PARALLEL_SIZE == "4"
    error_message = "the engine's options do not reach the worker"
  }
}

run "a_fleet_with_vllm_needs_its_image" {
  command = plan

  variables {
    fleets = {
      large = {
        models  = ["qwen=s3://weights/qwen"]
        engine  = "vllm"
        pools   = { steady = { purchase = "on_demand", instance_types = ["g6.12xlarge"], max_instances = 2 } }
        scaling = { max = 2 }
      }
    }
  }

  expect_failures = [var.vllm_image]
}

run "prefill_and_decode_workers" {
  variables {
    fleets = {
      prompts = {
        models  = ["llama=s3://weights/llama"]
        role    = "prefill"
        pools   = { steady = { purchase = "on_demand", instance_types = ["p5.4xlarge"], max_instances = 2 } }
        scaling = { min = 1, max = 2 }
      }
      answers = {
        models  = ["llama=s3://weights/llama"]
        role    = "decode"
        pools   = { steady = { purchase = "on_demand", instance_types = ["g6e.xlarge"], max_instances = 6 } }
        scaling = { min = 1, max = 6 }
      }
    }
  }

  assert {
    condition     = [for name in ["worker-prompts", "worker-answers"] : slice(output.processes[name].command, 3, 5)] == [["--role", "prefill"], ["--role", "decode"]]
    error_message = "a fleet has no role, or the other one's"
  }

  assert {
    condition     = output.processes["worker-prompts"].environment.TOKENMILL_KV_TRANSFER__PORT == tostring(module.network.kv_transfer.port)
    error_message = "the workers serve blocks on another port than the open one"
  }

  assert {
    condition     = { for name, pool in jsondecode(output.processes["dispatcher"].environment.TOKENMILL_AUTOSCALE__POOLS) : name => pool.role } == { prompts = "prefill", answers = "decode" }
    error_message = "the autoscaler does not have the fleets' roles"
  }
}

run "no_role_no_port" {
  command = plan

  assert {
    condition     = module.network.kv_transfer == null
    error_message = "a port is open that no worker uses"
  }
}

run "one_zone_is_not_enough" {
  command = plan

  variables {
    availability_zones = ["eu-central-1a"]
  }

  expect_failures = [var.availability_zones]
}
