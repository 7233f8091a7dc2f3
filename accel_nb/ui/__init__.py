"""The live panel, its picture, and the kernel's side of the sidebar. Imports no torch."""
