"""Fair queues for host-device copies of all tenants of a GPU."""
