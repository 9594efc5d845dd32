"""What can be done with any posterior: measure, report, decide, compress, distill."""
