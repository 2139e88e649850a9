"""Models as data and maths: layers, tensor tables and the forward pass. No page, slot or fence."""
