# A VPC without public addresses of instances: private subnets, S3's gateway endpoint, and either NAT or an interface
# endpoint for each AWS service in use.

data "aws_region" "current" {}

locals {
  region  = data.aws_region.current.name
  zones   = { for index, zone in var.availability_zones : zone => index }
  public  = var.nat != "none" || var.public_subnets ? local.zones : {}
  nats    = var.nat == "per_zone" ? local.zones : var.nat == "single" ? { (var.availability_zones[0]) = 0 } : {}
  nat_of  = { for zone in var.availability_zones : zone => var.nat == "per_zone" ? zone : var.availability_zones[0] }
  serving = slice(var.availability_zones, 0, min(var.endpoint_zones, length(var.availability_zones)))

  # ECR's buckets of image layers, and Amazon Linux's of packages.
  aws_buckets = [
    "arn:aws:s3:::prod-${local.region}-starport-layer-bucket",
    "arn:aws:s3:::al2023-repos-${local.region}-de612dc2",
  ]
  buckets = var.reachable_buckets == null ? [] : concat(var.reachable_buckets, local.aws_buckets)
}

resource "aws_vpc" "this" {
  cidr_block           = var.cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = merge(var.tags, { Name = var.name })
}

# An interface without a security group of its own has no connectivity.
resource "aws_default_security_group" "closed" {
  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-closed" })
}

resource "aws_subnet" "private" {
  for_each = local.zones

  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.cidr, 4, each.value)
  map_public_ip_on_launch = false
  tags                    = merge(var.tags, { Name = "${var.name}-private-${each.key}" })
}

resource "aws_route_table" "private" {
  for_each = local.zones

  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-private-${each.key}" })
}

resource "aws_route_table_association" "private" {
  for_each = local.zones

  subnet_id      = aws_subnet.private[each.key].id
  route_table_id = aws_route_table.private[each.key].id
}

# --- Internet access, if configured

resource "aws_internet_gateway" "this" {
  count = length(local.public) > 0 ? 1 : 0

  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = var.name })
}

resource "aws_subnet" "public" {
  for_each = local.public

  vpc_id                  = aws_vpc.this.id
  availability_zone       = each.key
  cidr_block              = cidrsubnet(var.cidr, 4, 8 + each.value)
  map_public_ip_on_launch = false
  tags                    = merge(var.tags, { Name = "${var.name}-public-${each.key}" })
}

resource "aws_route_table" "public" {
  count = length(local.public) > 0 ? 1 : 0

  vpc_id = aws_vpc.this.id
  tags   = merge(var.tags, { Name = "${var.name}-public" })
}

resource "aws_route" "public" {
  count = length(local.public) > 0 ? 1 : 0

  route_table_id         = aws_route_table.public[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_route_table_association" "public" {
  for_each = local.public

  subnet_id      = aws_subnet.public[each.key].id
  route_table_id = aws_route_table.public[0].id
}

resource "aws_eip" "nat" {
  for_each = local.nats

  domain = "vpc"
  tags   = merge(var.tags, { Name = "${var.name}-nat-${each.key}" })
}

resource "aws_nat_gateway" "this" {
  for_each = local.nats

  subnet_id     = aws_subnet.public[each.key].id
  allocation_id = aws_eip.nat[each.key].id
  tags          = merge(var.tags, { Name = "${var.name}-${each.key}" })

  depends_on = [aws_route.public]
}

resource "aws_route" "private" {
  for_each = var.nat == "none" ? {} : local.zones

  route_table_id         = aws_route_table.private[each.key].id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[local.nat_of[each.key]].id
}

# --- To AWS's services, without the internet

data "aws_iam_policy_document" "s3_endpoint" {
  # checkov:skip=CKV_AWS_283: an endpoint's policy narrows what the caller's own and the bucket's policies allow; it grants nothing itself

  statement {
    sid       = "ReachableBuckets"
    actions   = ["s3:GetObject", "s3:GetObjectVersion", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload", "s3:ListBucket"]
    resources = var.reachable_buckets == null ? ["*"] : concat(local.buckets, [for arn in local.buckets : "${arn}/*"])

    principals {
      type        = "AWS"
      identifiers = ["*"]
    }
  }
}

resource "aws_vpc_endpoint" "s3" {
  vpc_id            = aws_vpc.this.id
  vpc_endpoint_type = "Gateway"
  service_name      = "com.amazonaws.${local.region}.s3"
  route_table_ids   = [for table in aws_route_table.private : table.id]
  policy            = data.aws_iam_policy_document.s3_endpoint.json
  tags              = merge(var.tags, { Name = "${var.name}-s3" })
}

resource "aws_security_group" "endpoints" {
  count = length(var.interface_endpoints) > 0 ? 1 : 0

  name_prefix = "${var.name}-endpoints-"
  description = "Interface endpoints: HTTPS from inside the VPC"
  vpc_id      = aws_vpc.this.id
  tags        = merge(var.tags, { Name = "${var.name}-endpoints" })

  lifecycle {
    create_before_destroy = true
  }
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  count = length(var.interface_endpoints) > 0 ? 1 : 0

  security_group_id = aws_security_group.endpoints[0].id
  description       = "HTTPS from inside the VPC"
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
  cidr_ipv4         = var.cidr
}

resource "aws_vpc_endpoint" "interface" {
  for_each = var.interface_endpoints

  vpc_id              = aws_vpc.this.id
  vpc_endpoint_type   = "Interface"
  service_name        = "com.amazonaws.${local.region}.${each.value}"
  subnet_ids          = [for zone in local.serving : aws_subnet.private[zone].id]
  security_group_ids  = [aws_security_group.endpoints[0].id]
  private_dns_enabled = true
  tags                = merge(var.tags, { Name = "${var.name}-${each.value}" })
}
