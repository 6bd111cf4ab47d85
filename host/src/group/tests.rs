//! Groups of the CPU, and meetings of ranks.
