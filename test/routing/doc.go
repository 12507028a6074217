// Package routing proves by traffic, on real engines in the lab, that the
// agent keeps a Docker network routed: what is reachable, from where, with
// which source address, and that restarts and damage cost nothing.
package routing
