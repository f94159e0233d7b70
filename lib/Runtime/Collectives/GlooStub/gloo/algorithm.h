//===- algorithm.h - c10d includes it and uses nothing of it; see context.h
