mock_provider "aws" {
  source = "../../mocks"
}

variables {
  name       = "tokenmill"
  bucket     = "answers"
  bucket_arn = "arn:aws:s3:::answers"
}

run "drops_without_kafka" {
  assert {
    condition     = length(aws_msk_cluster.this) == 0 && output.kafka == null
    error_message = "there is a Kafka cluster without var.kafka"
  }

  assert {
    condition     = [for queue in aws_s3_bucket_notification.drops.queue : queue.filter_prefix] == ["incoming/"]
    error_message = "the bucket sends notifications of other prefixes than the dropped files'"
  }

  assert {
    condition     = jsondecode(aws_sqs_queue.drops.redrive_policy).maxReceiveCount == 100
    error_message = "messages that can't be handled are redelivered for ever"
  }
}

run "kafka" {
  variables {
    kafka = {
      vpc_id       = "vpc-1"
      subnet_ids   = ["subnet-a", "subnet-b", "subnet-c"]
      client_cidrs = ["10.64.0.0/16"]
    }
  }

  assert {
    condition     = aws_msk_cluster.this[0].number_of_broker_nodes == 3
    error_message = "not a broker in each zone"
  }

  assert {
    condition = alltrue([
      !aws_msk_cluster.this[0].client_authentication[0].unauthenticated,
      aws_msk_cluster.this[0].client_authentication[0].sasl[0].iam,
      aws_msk_cluster.this[0].encryption_info[0].encryption_in_transit[0].client_broker == "TLS",
      aws_msk_cluster.this[0].broker_node_group_info[0].connectivity_info[0].public_access[0].type == "DISABLED",
    ])
    error_message = "Kafka accepts clients without IAM and TLS"
  }

  assert {
    condition     = strcontains(aws_msk_configuration.this[0].server_properties, "min.insync.replicas=2")
    error_message = "the loss of one broker loses records"
  }

  assert {
    condition     = [for rule in aws_vpc_security_group_ingress_rule.kafka : rule.from_port] == [9098]
    error_message = "another port than IAM's is open"
  }

  assert {
    condition     = output.environment.TOKENMILL_KAFKA__SECURITY_PROTOCOL == "SASL_SSL" && output.environment.TOKENMILL_KAFKA__SASL_MECHANISM == "AWS_MSK_IAM"
    error_message = "the intake lacks the settings for IAM over TLS"
  }
}

run "two_brokers" {
  variables {
    kafka = {
      vpc_id       = "vpc-1"
      subnet_ids   = ["subnet-a", "subnet-b"]
      client_cidrs = []
    }
  }

  assert {
    condition     = strcontains(aws_msk_configuration.this[0].server_properties, "default.replication.factor=2") && strcontains(aws_msk_configuration.this[0].server_properties, "min.insync.replicas=1")
    error_message = "with two brokers no record could be written while one is down"
  }
}

run "prefixes_may_not_overlap" {
  command = plan

  variables {
    prefixes = { "incoming/" = "default", "incoming/team-a/" = "team-a" }
  }

  expect_failures = [var.prefixes]
}
