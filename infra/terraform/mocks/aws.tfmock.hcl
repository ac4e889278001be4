# Mocked responses of AWS. The provider checks the form of ARNs, so mocks need well-formed ones.

mock_data "aws_caller_identity" {
  defaults = { account_id = "000000000000" }
}

mock_data "aws_region" {
  defaults = { name = "eu-central-1" }
}

mock_data "aws_iam_policy_document" {
  defaults = { json = "{\"Version\":\"2012-10-17\",\"Statement\":[]}" }
}

mock_data "aws_secretsmanager_random_password" {
  defaults = { random_password = "0123456789abcdef0123456789abcdef" }
}

mock_data "aws_ssm_parameter" {
  defaults = { value = "ami-0123456789abcdef0" }
}

mock_resource "aws_kms_key" {
  defaults = { arn = "arn:aws:kms:eu-central-1:000000000000:key/00000000-0000-0000-0000-000000000000", key_id = "00000000-0000-0000-0000-000000000000" }
}

mock_resource "aws_iam_role" {
  defaults = { arn = "arn:aws:iam::000000000000:role/mock" }
}

mock_resource "aws_iam_instance_profile" {
  defaults = { arn = "arn:aws:iam::000000000000:instance-profile/mock" }
}

mock_resource "aws_s3_bucket" {
  defaults = { arn = "arn:aws:s3:::answers" }
}

mock_resource "aws_sqs_queue" {
  defaults = { arn = "arn:aws:sqs:eu-central-1:000000000000:mock" }
}

mock_resource "aws_sns_topic" {
  defaults = { arn = "arn:aws:sns:eu-central-1:000000000000:mock" }
}

mock_resource "aws_cloudwatch_log_group" {
  defaults = { arn = "arn:aws:logs:eu-central-1:000000000000:log-group:mock" }
}

mock_resource "aws_lb" {
  defaults = { arn = "arn:aws:elasticloadbalancing:eu-central-1:000000000000:loadbalancer/app/mock/0", arn_suffix = "app/mock/0" }
}

mock_resource "aws_lb_target_group" {
  defaults = { arn = "arn:aws:elasticloadbalancing:eu-central-1:000000000000:targetgroup/mock/0", arn_suffix = "targetgroup/mock/0" }
}

mock_resource "aws_ecs_cluster" {
  defaults = { arn = "arn:aws:ecs:eu-central-1:000000000000:cluster/mock" }
}

mock_resource "aws_ecs_task_definition" {
  defaults = { arn = "arn:aws:ecs:eu-central-1:000000000000:task-definition/mock:1" }
}

mock_resource "aws_autoscaling_group" {
  defaults = { arn = "arn:aws:autoscaling:eu-central-1:000000000000:autoScalingGroup:0:autoScalingGroupName/mock" }
}

mock_resource "aws_launch_template" {
  defaults = { id = "lt-0123456789abcdef0" }
}

mock_resource "aws_appautoscaling_policy" {
  defaults = { arn = "arn:aws:autoscaling:eu-central-1:000000000000:scalingPolicy:0:resource/ecs/mock" }
}

mock_resource "aws_secretsmanager_secret" {
  defaults = { arn = "arn:aws:secretsmanager:eu-central-1:000000000000:secret:mock" }
}

mock_resource "aws_msk_configuration" {
  defaults = { arn = "arn:aws:kafka:eu-central-1:000000000000:configuration/mock/0", latest_revision = 1 }
}

mock_resource "aws_msk_cluster" {
  defaults = {
    arn                        = "arn:aws:kafka:eu-central-1:000000000000:cluster/tokenmill/0"
    bootstrap_brokers_sasl_iam = "b-1.mock:9098,b-2.mock:9098,b-3.mock:9098"
  }
}
