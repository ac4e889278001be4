output "queue_url" {
  description = "The queue that receives the bucket's notifications of dropped files."
  value       = aws_sqs_queue.drops.id
}

output "queue_name" {
  description = "The queue's name, for alarms."
  value       = aws_sqs_queue.drops.name
}

output "dead_letter_queue_name" {
  description = "Name of its dead-letter queue, for alarms."
  value       = aws_sqs_queue.dead.name
}

output "intake_policy" {
  description = "Policy document of the intake's rights on the queue and on Kafka."
  value       = data.aws_iam_policy_document.intake.json
}

output "kafka" {
  description = "Name and number of brokers of the MSK cluster, for alarms. null: no Kafka."
  value = var.kafka == null ? null : {
    cluster_name = aws_msk_cluster.this[0].cluster_name
    brokers      = local.brokers
  }
}

output "kafka_cluster_arn" {
  description = "ARN of the MSK cluster, for the policies of producers and consumers. null: no Kafka."
  value       = one(aws_msk_cluster.this[*].arn)
}

output "environment" {
  description = "Environment variables of the intake: addresses and settings of its ingest sources."
  value = merge(
    {
      TOKENMILL_BUCKET__QUEUE_URL = aws_sqs_queue.drops.id
      TOKENMILL_BUCKET__PREFIXES  = jsonencode(var.prefixes)
    },
    var.kafka == null ? {} : {
      TOKENMILL_KAFKA__BOOTSTRAP_SERVERS = jsonencode(split(",", aws_msk_cluster.this[0].bootstrap_brokers_sasl_iam))
      TOKENMILL_KAFKA__SECURITY_PROTOCOL = "SASL_SSL"
      TOKENMILL_KAFKA__SASL_MECHANISM    = "AWS_MSK_IAM"
      TOKENMILL_KAFKA__TOPIC_PREFIX      = var.kafka.topic_prefix
      TOKENMILL_KAFKA__GROUP_ID          = var.kafka.consumer_group
      TOKENMILL_KAFKA__REQUESTS          = jsonencode(var.kafka.request_topics)
      TOKENMILL_KAFKA__JOBS              = jsonencode(var.kafka.job_topics)
      TOKENMILL_KAFKA__URI_PREFIXES      = jsonencode(var.kafka.uri_prefixes)
    },
  )
}
