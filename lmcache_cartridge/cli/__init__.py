"""The commands of `lmcache-cartridge`. None loads torch until it runs."""
