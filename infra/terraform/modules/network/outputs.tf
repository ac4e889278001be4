output "vpc_id" {
  description = "Id of the VPC."
  value       = aws_vpc.this.id
}

output "cidr" {
  description = "The VPC's address range."
  value       = var.cidr
}

output "private_subnet_ids" {
  description = "Private subnet of each zone, in the zones' order. The whole installation runs in them."
  value       = [for zone in var.availability_zones : aws_subnet.private[zone].id]
}

output "public_subnet_ids" {
  description = "Public subnet of each zone, if any: for NAT, and for a balancer that is reachable from the internet."
  value       = [for zone in keys(local.public) : aws_subnet.public[zone].id]
}

output "kv_transfer" {
  description = "Port of KV transfers, and the security group of the workers that exchange blocks. null: none."
  value       = one([for group in aws_security_group.kv_transfer : { port = var.kv_transfer_port, security_group_id = group.id }])
}
