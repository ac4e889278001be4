# Kafka, the ingest source for single requests and jobs. Clients authenticate by IAM over TLS, so there is no password.

locals {
  brokers     = try(length(var.kafka.subnet_ids) * var.kafka.brokers_per_zone, 0)
  replication = min(3, local.brokers)

  server_properties = {
    "auto.create.topics.enable"      = try(tostring(var.kafka.allow_topic_creation), "")
    "default.replication.factor"     = tostring(local.replication)
    "min.insync.replicas"            = tostring(max(1, local.replication - 1))
    "num.partitions"                 = try(tostring(var.kafka.partitions), "")
    "unclean.leader.election.enable" = "false"
    "log.retention.hours"            = try(tostring(var.kafka.retention_hours), "")
    # A request may have 10 MiB; the rest is for headers.
    "message.max.bytes"       = "11534336"
    "replica.fetch.max.bytes" = "11534336"
  }
}

resource "aws_security_group" "kafka" {
  count = var.kafka == null ? 0 : 1

  name_prefix = "${var.name}-kafka-"
  description = "Kafka: IAM over TLS from its clients, brokers among themselves"
  vpc_id      = var.kafka.vpc_id
  tags        = merge(var.tags, { Name = "${var.name}-kafka" })

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "kafka" {
  for_each = toset(try(var.kafka.client_cidrs, []))

  security_group_id = aws_security_group.kafka[0].id
  description       = "Kafka's clients, by IAM over TLS"
  ip_protocol       = "tcp"
  from_port         = 9098
  to_port           = 9098
  cidr_ipv4         = each.value
}

resource "aws_vpc_security_group_ingress_rule" "brokers" {
  count = var.kafka == null ? 0 : 1

  security_group_id            = aws_security_group.kafka[0].id
  description                  = "Brokers among themselves"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.kafka[0].id
}

resource "aws_vpc_security_group_egress_rule" "brokers" {
  count = var.kafka == null ? 0 : 1

  security_group_id            = aws_security_group.kafka[0].id
  description                  = "Brokers among themselves"
  ip_protocol                  = "-1"
  referenced_security_group_id = aws_security_group.kafka[0].id
}

resource "aws_cloudwatch_log_group" "kafka" {
  count = var.kafka == null ? 0 : 1

  name              = "/tokenmill/${var.name}/kafka"
  retention_in_days = var.kafka.log_retention_days
  kms_key_id        = var.kms_key_arn
  tags              = var.tags
}

resource "aws_msk_configuration" "this" {
  count = var.kafka == null ? 0 : 1

  name           = var.name
  kafka_versions = [var.kafka.version]

  server_properties = join("\n", [for key, value in local.server_properties : "${key}=${value}"])
}

resource "aws_msk_cluster" "this" {
  count = var.kafka == null ? 0 : 1

  cluster_name           = var.name
  kafka_version          = var.kafka.version
  number_of_broker_nodes = local.brokers
  enhanced_monitoring    = var.kafka.monitoring
  tags                   = var.tags

  broker_node_group_info {
    instance_type   = var.kafka.instance_type
    client_subnets  = var.kafka.subnet_ids
    security_groups = [aws_security_group.kafka[0].id]

    storage_info {
      ebs_storage_info {
        volume_size = var.kafka.volume_gib
      }
    }

    connectivity_info {
      public_access {
        type = "DISABLED"
      }
    }
  }

  client_authentication {
    unauthenticated = false

    sasl {
      iam   = true
      scram = false
    }
  }

  encryption_info {
    encryption_at_rest_kms_key_arn = var.kms_key_arn

    encryption_in_transit {
      client_broker = "TLS"
      in_cluster    = true
    }
  }

  configuration_info {
    arn      = aws_msk_configuration.this[0].arn
    revision = aws_msk_configuration.this[0].latest_revision
  }

  logging_info {
    broker_logs {
      cloudwatch_logs {
        enabled   = true
        log_group = aws_cloudwatch_log_group.kafka[0].name
      }
    }
  }
}

# The intake's rights: read requests and jobs; write results, events and dead letters.
data "aws_iam_policy_document" "kafka" {
  count = var.kafka == null ? 0 : 1

  statement {
    sid       = "KafkaCluster"
    actions   = ["kafka-cluster:Connect", "kafka-cluster:DescribeCluster", "kafka-cluster:WriteDataIdempotently"]
    resources = [aws_msk_cluster.this[0].arn]
  }

  statement {
    sid       = "KafkaReading"
    actions   = ["kafka-cluster:DescribeTopic", "kafka-cluster:ReadData"]
    resources = [for topic in local.topics_in : "${local.topic_arn}/${topic}"]
  }

  statement {
    sid       = "KafkaWriting"
    actions   = ["kafka-cluster:DescribeTopic", "kafka-cluster:WriteData"]
    resources = [for topic in local.topics_out : "${local.topic_arn}/${topic}"]
  }

  dynamic "statement" {
    for_each = var.kafka.allow_topic_creation ? [true] : []

    content {
      sid       = "KafkaTopics"
      actions   = ["kafka-cluster:CreateTopic"]
      resources = [for topic in concat(local.topics_in, local.topics_out) : "${local.topic_arn}/${topic}"]
    }
  }

  statement {
    sid       = "KafkaGroup"
    actions   = ["kafka-cluster:DescribeGroup", "kafka-cluster:AlterGroup"]
    resources = ["${local.group_arn}/${var.kafka.consumer_group}"]
  }
}

locals {
  cluster_arn = try(aws_msk_cluster.this[0].arn, "")
  topic_arn   = replace(local.cluster_arn, ":cluster/", ":topic/")
  group_arn   = replace(local.cluster_arn, ":cluster/", ":group/")
  prefix      = try(var.kafka.topic_prefix, "")

  topics_in = var.kafka == null ? [] : concat(
    length(var.kafka.request_topics) > 0 ? keys(var.kafka.request_topics) : ["${local.prefix}.requests"],
    length(var.kafka.job_topics) > 0 ? keys(var.kafka.job_topics) : ["${local.prefix}.jobs"],
  )
  topics_out = [for kind in ["results", "events", "deadletter"] : "${local.prefix}.${kind}"]
}
