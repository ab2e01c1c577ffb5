"""Programs that try to break `experiments.pretrain`: kills, full disks and damages."""
