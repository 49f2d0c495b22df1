"""The commands of `lmcache-cartridge`, by what they are about. None loads torch until it runs."""
