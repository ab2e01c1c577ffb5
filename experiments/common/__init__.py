"""What programs share: results files, timing, cases, tables, ahead-of-time compiles."""
