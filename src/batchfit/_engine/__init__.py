"""What the features are made of: trials, snapshots, traces, devices. No package here imports a feature."""
