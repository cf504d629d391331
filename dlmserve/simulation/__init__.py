"""What a simulated cluster is made of: instances, unmasking, workloads, results. No torch, no clock."""
