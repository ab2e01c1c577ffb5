def is_installed():
    return False
