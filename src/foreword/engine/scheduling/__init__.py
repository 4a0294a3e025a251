"""Which requests take part in the next pass: classes, priorities, shares and deadlines."""
