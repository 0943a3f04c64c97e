"""The sentinel in a program that does not mention it: `tpcompile run -- COMMAND` starts it in every rank."""
